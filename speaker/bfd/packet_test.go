package bfd

import (
	"encoding/hex"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// example is a packet of ours and its bytes, by the figure in RFC 5880,
// section 4.1.
var (
	example = Packet{
		diagnostic: NeighborSignaledDown, state: Up, poll: true, multiplier: 3, my: 0x01020304, your: 0x0a0b0c0d,
		desiredMinTx: 300 * time.Millisecond, requiredMinRx: 50 * time.Millisecond,
	}
	exampleBytes = "23e00318" + "01020304" + "0a0b0c0d" + "000493e0" + "0000c350" + "00000000"
)

func TestMarshal(t *testing.T) {
	t.Parallel()
	require.Equal(t, exampleBytes, hex.EncodeToString(example.marshal()))
	got, why := parse(example.marshal())
	require.Empty(t, why)
	require.Equal(t, example, got)

	final := Packet{state: Init, final: true, demand: true, multiplier: 255, my: 1, your: 2, desiredMinTx: longestInterval}
	got, why = parse(final.marshal())
	require.Empty(t, why)
	require.Equal(t, final, got)
}

func TestParseRefuses(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		change func([]byte) []byte
		why    Discard
	}{
		"as it is":                    {func(b []byte) []byte { return b }, used},
		"nothing":                     {func([]byte) []byte { return nil }, BadLength},
		"a byte is missing":           {func(b []byte) []byte { return b[:23] }, BadLength},
		"version 0":                   {func(b []byte) []byte { b[0] = 0x03; return b }, BadVersion},
		"version 2":                   {func(b []byte) []byte { b[0] = 0x43; return b }, BadVersion},
		"length 23":                   {func(b []byte) []byte { b[3] = 23; return b }, BadLength},
		"length beyond the payload":   {func(b []byte) []byte { b[3] = 25; return b }, BadLength},
		"bytes after the packet":      {func(b []byte) []byte { return append(b, 1, 2, 3) }, used},
		"authenticated, without room": {func(b []byte) []byte { b[1] |= flagAuthentication; b[3] = 25; return append(b, 0) }, BadLength},
		"authenticated":               {func(b []byte) []byte { b[1] |= flagAuthentication; b[3] = 26; return append(b, 1, 2) }, used},
		"multiplier 0":                {func(b []byte) []byte { b[2] = 0; return b }, NoMultiplier},
		"multipoint":                  {func(b []byte) []byte { b[1] |= flagMultipoint; return b }, MultipointSet},
		"no discriminator of its own": {func(b []byte) []byte { clear(b[4:8]); return b }, NoMyDiscriminator},
		"Up, and does not know us":    {func(b []byte) []byte { clear(b[8:12]); return b }, NoYourDiscriminator},
		"Init, and does not know us": {func(b []byte) []byte { clear(b[8:12]); b[1] = byte(Init) << stateShift; return b },
			NoYourDiscriminator},
		"Down, and does not know us":    {func(b []byte) []byte { clear(b[8:12]); b[1] = byte(Down) << stateShift; return b }, used},
		"AdminDown, and knows us not":   {func(b []byte) []byte { clear(b[8:12]); b[1] = 0; return b }, used},
		"diagnostic and state of later": {func(b []byte) []byte { b[0] |= diagnosticBits; return b }, used},
	} {
		_, why := parse(test.change(example.marshal()))
		require.Equal(t, test.why, why, name)
	}
}

func TestWords(t *testing.T) {
	t.Parallel()
	require.Equal(t, "AdminDown Down Init Up", AdminDown.String()+" "+Down.String()+" "+Init.String()+" "+Up.String())
	require.Equal(t, "control detection time expired", DetectionTimeExpired.String())
	require.Equal(t, "administratively down", AdministrativelyDown.String())
	require.Equal(t, "diagnostic 31", Diagnostic(31).String())
}

func FuzzParse(f *testing.F) {
	for _, b := range corpus() {
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		p, why := parse(b)
		if why != used || p.authentic {
			return
		}
		again, why := parse(p.marshal())
		require.Empty(t, why)
		require.Equal(t, p, again)
	})
}

// corpus are packets that lead into every branch.
func corpus() [][]byte {
	down := Packet{state: Down, multiplier: 3, my: 9, desiredMinTx: time.Second, requiredMinRx: time.Second}
	demand := Packet{state: Up, demand: true, final: true, multiplier: 1, my: 9, your: 7}
	admin := Packet{diagnostic: AdministrativelyDown, multiplier: 3, my: 9, your: 7}
	long := append(example.marshal(), make([]byte, 40)...)
	long[1] |= flagAuthentication
	long[3] = 64
	return [][]byte{nil, {0x20}, example.marshal(), down.marshal(), demand.marshal(), admin.marshal(), long}
}
