package guard

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/hashicorp/memberlist"
)

// Message types of memberlist (net.go).
const (
	ping byte = iota
	indirectPing
	ack
	suspect
	alive
	dead
	pushPull
	compound
	_ // messages of users: speakers send none
	_ // compressed: speakers compress nothing
	_ // encrypted: the guard does that
	nack
	checksum
	failure
)

const (
	checksumSize = 5
	// maxName is the longest name of a Node.
	maxName = 253
	// maxError is the longest text of a failure.
	maxError = 1 << 10
	// protocol is the version that speakers speak: memberlist's default.
	protocol = memberlist.ProtocolVersion2Compatible
)

// kind is what a field's value may be.
type kind int

const (
	number      kind = iota
	incarnation      // how often a speaker has published or contradicted something
	boolean
	name     // a Node's
	address  // an IP address
	metadata // of a speaker
	versions // that a speaker understands
	payload  // of an answer: speakers send none
	text
)

// field is a field of a message.
type field struct {
	name     string
	kind     kind
	optional bool
}

// The fields that memberlist sends. memberlist does not check what it reads: a node with an address of
// three bytes makes it ask DNS, and a node with another protocol keeps all others from joining.
var (
	source = []field{{"SourceAddr", address, true}, {"SourcePort", number, true}, {"SourceNode", name, true}}
	state  = []field{{"Name", name, false}, {"Addr", address, false}, {"Port", number, false}, {"Meta", metadata, false},
		{"Incarnation", incarnation, false}, {"State", number, false}, {"Vsn", versions, false}}

	packets = map[byte][]field{
		ping: append([]field{{"SeqNo", number, false}, {"Node", name, false}}, source...),
		indirectPing: append([]field{{"SeqNo", number, false}, {"Target", address, false}, {"Port", number, false},
			{"Node", name, false}, {"Nack", boolean, false}}, source...),
		ack:     {{"SeqNo", number, false}, {"Payload", payload, false}},
		nack:    {{"SeqNo", number, false}},
		suspect: {{"Incarnation", incarnation, false}, {"Node", name, false}, {"From", name, false}},
		dead:    {{"Incarnation", incarnation, false}, {"Node", name, false}, {"From", name, false}},
		alive: {{"Incarnation", incarnation, false}, {"Node", name, false}, {"Addr", address, false}, {"Port", number, false},
			{"Meta", metadata, false}, {"Vsn", versions, false}},
	}
	pushPullHeader = []field{{"Nodes", number, false}, {"UserStateLen", number, false}, {"Join", boolean, false}}
	failureFields  = []field{{"Error", text, false}}
)

var (
	errShort = errors.New("message ends too early")
	errRest  = errors.New("message goes on after its end")
)

// checkPacket returns an error if speakers do not send this in a packet.
func checkPacket(b []byte) error {
	if len(b) > checksumSize && b[0] == checksum {
		b = b[checksumSize:] // memberlist compares the checksum
	}
	if len(b) < 2 || b[0] != compound {
		return checkSingle(b)
	}
	count, lengths := int(b[1]), b[2:]
	if len(lengths) < 2*count {
		return errShort
	}
	lengths, b = lengths[:2*count], lengths[2*count:]
	for ; len(lengths) > 0; lengths = lengths[2:] {
		n := int(binary.BigEndian.Uint16(lengths))
		if len(b) < n {
			return errShort
		}
		if err := checkSingle(b[:n]); err != nil {
			return err
		}
		b = b[n:]
	}
	return checkEnd(b)
}

// checkSingle returns an error if this is not one message of a packet.
func checkSingle(b []byte) error {
	if len(b) == 0 {
		return errShort
	}
	fields, ok := packets[b[0]]
	if !ok {
		return fmt.Errorf("packet of type %d", b[0])
	}
	rest, err := readObject(b[1:], fields, nil)
	if err != nil {
		return err
	}
	return checkEnd(rest)
}

// checkMessage returns an error if speakers do not send this on a connection.
func checkMessage(b []byte) error {
	if len(b) == 0 {
		return errShort
	}
	switch b[0] {
	case pushPull:
		return checkState(b[1:])
	case failure:
		rest, err := readObject(b[1:], failureFields, nil)
		if err != nil {
			return err
		}
		return checkEnd(rest)
	}
	return fmt.Errorf("message of type %d", b[0])
}

// checkState returns an error if this is not a list of the states of all speakers.
func checkState(b []byte) error {
	numbers := map[string]uint64{}
	b, err := readObject(b, pushPullHeader, numbers)
	if err != nil {
		return err
	}
	if n := numbers["UserStateLen"]; n != 0 {
		return fmt.Errorf("%d bytes of state that speakers do not have", n)
	}
	for range numbers["Nodes"] { // if the number is too large, b ends before
		if b, err = readObject(b, state, nil); err != nil {
			return err
		}
	}
	return checkEnd(b)
}

func checkEnd(rest []byte) error {
	if len(rest) > 0 {
		return errRest
	}
	return nil
}

// The types of MessagePack in which memberlist's encoder writes objects, keys and values. From uint8Type to
// uint64Type, and from int8Type to int64Type, each type has twice as many bytes as the one before.
const (
	fixMap, fixMapEnd       = 0x80, 0x8f
	fixString, fixStringEnd = 0xa0, 0xbf
	null, no, yes           = 0xc0, 0xc2, 0xc3
	bin8, bin16             = 0xc4, 0xc5
	maxFixNumber            = 0x7f
	uint8Type, uint64Type   = 0xcc, 0xcf
	int8Type, int64Type     = 0xd0, 0xd3
	string8, string16       = 0xd9, 0xda
)

// readObject reads an object that has the fields and no others. It records the numbers,
// unless numbers is nil, and returns what comes after the object.
func readObject(b []byte, fields []field, numbers map[string]uint64) (rest []byte, err error) {
	if len(b) == 0 || b[0] < fixMap || b[0] > fixMapEnd {
		return nil, errors.New("no object")
	}
	count, b := int(b[0]-fixMap), b[1:]
	var seen uint
	for range count {
		if len(b) == 0 || b[0] < fixString || b[0] > fixStringEnd {
			return nil, errors.New("no name of a field")
		}
		var key []byte
		if key, b, err = readBytes(b); err != nil {
			return nil, err
		}
		i := slices.IndexFunc(fields, func(f field) bool { return f.name == string(key) })
		if i < 0 || seen&(1<<i) != 0 {
			return nil, fmt.Errorf("field %q is unknown or there twice", key)
		}
		seen |= 1 << i
		var n uint64
		if n, b, err = readValue(b, fields[i].kind); err != nil {
			return nil, fmt.Errorf("read %q: %w", key, err)
		}
		if numbers != nil {
			numbers[fields[i].name] = n
		}
	}
	for i, f := range fields {
		if !f.optional && seen&(1<<i) == 0 {
			return nil, fmt.Errorf("field %q is missing", f.name)
		}
	}
	return b, nil
}

// readValue reads a value of the kind. It returns the value if it is a number.
func readValue(b []byte, k kind) (n uint64, rest []byte, err error) {
	switch k {
	case number:
		return readNumber(b)
	case incarnation:
		if n, rest, err = readNumber(b); err == nil && n > MaxIncarnation(time.Now()) {
			err = fmt.Errorf("incarnation %d", n)
		}
		return n, rest, err
	case boolean:
		if len(b) == 0 || b[0] != no && b[0] != yes {
			return 0, nil, errors.New("no boolean")
		}
		return 0, b[1:], nil
	case name, address, metadata, versions, payload, text:
	}
	value, rest, err := readBytes(b)
	if err == nil && !fits(value, k) {
		err = fmt.Errorf("%d bytes that it cannot have", len(value))
	}
	return 0, rest, err
}

// fits reports whether a value may be of the kind.
func fits(value []byte, k kind) bool {
	switch k {
	case name:
		return len(value) > 0 && len(value) <= maxName && !slices.ContainsFunc(value, func(c byte) bool { return !inName(c) })
	case address:
		return len(value) == 4 || len(value) == 16
	case metadata:
		return len(value) <= memberlist.MetaMaxSize
	case versions:
		return len(value) == 6 && 0 < value[0] && value[0] <= protocol && protocol <= value[1] && value[2] == protocol &&
			value[3] == 0 && value[5] == 0
	case payload:
		return len(value) == 0
	case text:
		return len(value) <= maxError
	case number, incarnation, boolean:
	}
	return false
}

// MaxIncarnation returns the highest incarnation that passes at a time. A speaker contradicts a false claim about itself by a
// higher incarnation, and the number wraps to 0. So without a bound, one packet of an attacker with the key could have the highest
// number, and nothing of the speaker would be accepted after it. The bound rises by 4 each second, so that a contradiction passes
// a moment later. Honest speakers count from 1 at each start and stay below the bound even if a clock is wrong by years.
func MaxIncarnation(now time.Time) uint64 {
	const honest, year2026, year2060 = 1 << 20, 1767225600, 2840140800
	return honest + uint64(4*(min(max(now.Unix(), year2026), year2060)-year2026))
}

// left is the message that a speaker has left, whatever it has published before.
func left(node string) []byte {
	b := append([]byte{dead, fixMap | 3, fixString | 11}, "Incarnation"...)
	b = binary.BigEndian.AppendUint64(append(b, uint64Type), MaxIncarnation(time.Now()))
	for _, field := range []string{"Node", "From"} {
		b = append(append(b, fixString|4), field...)
		b = binary.BigEndian.AppendUint16(append(b, string16), uint16(len(node)))
		b = append(b, node...)
	}
	return b
}

// inName reports whether a Node's name may have the character.
func inName(c byte) bool {
	return 'a' <= c && c <= 'z' || '0' <= c && c <= '9' || c == '-' || c == '.'
}

// readNumber reads a number that is not negative.
func readNumber(b []byte) (n uint64, rest []byte, err error) {
	if len(b) == 0 {
		return 0, nil, errShort
	}
	head, b := b[0], b[1:]
	size, signed := 0, false
	switch {
	case head <= maxFixNumber:
		return uint64(head), b, nil
	case head >= uint8Type && head <= uint64Type:
		size = 1 << (head - uint8Type)
	case head >= int8Type && head <= int64Type:
		size, signed = 1<<(head-int8Type), true
	default:
		return 0, nil, errors.New("no number")
	}
	if len(b) < size {
		return 0, nil, errShort
	}
	if signed && b[0] >= 0x80 {
		return 0, nil, errors.New("negative")
	}
	for _, c := range b[:size] {
		n = n<<8 | uint64(c)
	}
	return n, b[size:], nil
}

// readBytes reads a text or bytes. It returns nil for the null value.
func readBytes(b []byte) (value, rest []byte, err error) {
	if len(b) == 0 {
		return nil, nil, errShort
	}
	head, b := b[0], b[1:]
	size, n := 0, 0
	switch {
	case head == null:
		return nil, b, nil
	case head >= fixString && head <= fixStringEnd:
		n = int(head - fixString)
	case head == string8 || head == bin8:
		size = 1
	case head == string16 || head == bin16:
		size = 2
	default:
		return nil, nil, errors.New("no text or bytes")
	}
	if len(b) < size {
		return nil, nil, errShort
	}
	for _, c := range b[:size] {
		n = n<<8 | int(c)
	}
	if b = b[size:]; len(b) < n {
		return nil, nil, errShort
	}
	return b[:n], b[n:], nil
}
