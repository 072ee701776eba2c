package bgp

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"unicode"

	packet "github.com/osrg/gobgp/v3/pkg/packet/bgp"
	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/pkg/reason"
)

// bfdDown is the subcode of Cease for a session that BFD ends (RFC 9384).
const bfdDown = 10

// Cause is a stable code for why a session came up or ended, in metrics and the
// log.
type Cause string

// The causes.
const (
	causeEstablished  Cause = "established"
	causeConfigured   Cause = "configuration" // the node's end has changed
	causePassword     Cause = "password"
	causeRemoved      Cause = "removed"
	causeStopped      Cause = "stopped"
	causeBFD          Cause = "bfd"
	causeHoldTimer    Cause = "hold_timer"
	causeSendTimer    Cause = "send_timer"
	causeNotification Cause = "notification" // the router ended it
	causeProtocol     Cause = "protocol"     // the router made a mistake
	causeConnection   Cause = "connection"
	causeReplaced     Cause = "replaced" // the router opened another connection
)

// Causes explains each Cause.
func Causes() reason.Texts[Cause] {
	return reason.Texts[Cause]{
		causeEstablished: {Cause: "The session came up.", Cure: "Nothing to do."},
		causeConfigured: {Cause: "The node's end of the session has changed, or can no longer be had.",
			Cure: "Not a fault: it comes back with the new settings. If not, lodestone bgp peers shows what it lacks."},
		causePassword: {Cause: "The password in the Secret of the peer's passwordSecretRef has changed.",
			Cure: "Not a fault: it comes back when the router has the new password, too.", Keys: []string{"peers[].passwordSecretRef"}},
		causeRemoved: {Cause: "The peer is no longer one of this node.",
			Cure: "Not a fault: the configuration has changed, or the node's labels no longer match the peer's nodeSelector.",
			Keys: []string{"peers[].nodeSelector"}},
		causeStopped: {Cause: "The speaker stops.", Cure: "Not a fault if it was restarted or updated; otherwise see why its pod ended."},
		causeBFD: {Cause: "BFD found the path to the router broken.",
			Cure: "See to the path and the router; the metric lodestone_bfd_transitions_total shows which side noticed."},
		causeHoldTimer: {Cause: "The router was not heard for the hold time, the smaller one of holdTime and the router's.",
			Cure: "See to the path and the router, and to its load.", Keys: []string{"peers[].holdTime"}},
		causeSendTimer: {Cause: "The router does not take what is sent.",
			Cure: "The router is overloaded or hangs: look at it, and at the MTU of the path."},
		causeNotification: {Cause: "The router ended the session with a NOTIFICATION, which the log has in words.",
			Cure: "Follow the words in the log or of lodestone bgp peers; the router's own log has more."},
		causeProtocol: {Cause: "The router made a mistake in the protocol, which the log describes.",
			Cure: "Compare AS numbers, capabilities and families of both ends; update the router."},
		causeConnection: {Cause: "The connection broke, or the router closed it without a reason.",
			Cure: "See whether the router restarted, and what its log has about this node."},
		causeReplaced: {Cause: "The router opened another connection.",
			Cure: "Nothing: the session goes on over the new one. If it happens often, see why the router loses the old one."},
	}
}

// Withholding is a stable code for why a prefix cannot be announced to a router.
type Withholding string

// The reasons.
const (
	withheldFamily    Withholding = "family_not_negotiated"
	withheldNextHop   Withholding = "no_next_hop"
	withheldForbidden Withholding = "not_permitted"
	withheldTooLong   Withholding = "attributes_too_long"
)

// Withholdings has the texts of each Withholding.
func Withholdings() reason.Texts[Withholding] {
	return reason.Texts[Withholding]{
		withheldFamily: {Cause: "The session does not carry the prefix's address family.",
			Cure: "Activate the family for this neighbour on the router, or announce such VIPs to another peer."},
		withheldNextHop: {Cause: "The node has no address of that family on the session's interface.",
			Cure: "Give the interface one, or use a session of that family."},
		withheldForbidden: {Cause: "The configuration lists in bgpPermit what may be announced by BGP, and the prefix is not in it.",
			Cure: "Add it to bgpPermit, or take the address out of the pools that are advertised by BGP.", Keys: []string{"bgpPermit"}},
		withheldTooLong: {Cause: "The attributes do not fit into one UPDATE message.",
			Cure: "Use fewer communities or a smaller asPathPrepend in the advertisements.",
			Keys: []string{"advertisements[].bgp.communities", "advertisements[].bgp.asPathPrepend"}},
	}
}

// failure is why a session ended, or an attempt to open one.
type failure struct {
	cause Cause
	text  string
	// notification is sent to the router. Nil: nothing is sent.
	notification *packet.BGPNotification
	// final is set when the router must drop the routes, even if it would keep them for a
	// restart.
	final bool
	// silent is set when a router that agreed to graceful restart is sent no NOTIFICATION, so
	// that it keeps the routes.
	silent bool
}

func (f *failure) Error() string { return f.text }

// refuse returns a failure for a mistake of the router.
func refuse(code, subcode uint8, data []byte, format string, args ...any) error {
	return &failure{cause: causeProtocol, text: fmt.Sprintf(format, args...), notification: notification(code, subcode, data)}
}

func notification(code, subcode uint8, data []byte) *packet.BGPNotification {
	return &packet.BGPNotification{ErrorCode: code, ErrorSubcode: subcode, Data: data}
}

func cease(subcode uint8) *packet.BGPNotification {
	return notification(packet.BGP_ERROR_CEASE, subcode, nil)
}

// ending returns the failure with which the node itself ends a session.
func ending(cause Cause, restarting bool) *failure {
	switch cause {
	case causeStopped:
		return &failure{cause: cause, text: "the speaker stops", notification: cease(packet.BGP_ERROR_SUB_ADMINISTRATIVE_SHUTDOWN),
			final: !restarting, silent: restarting}
	case causeRemoved:
		return &failure{cause: cause, text: "the peer is no longer one of this node",
			notification: cease(packet.BGP_ERROR_SUB_PEER_DECONFIGURED), final: true}
	case causePassword:
		return &failure{cause: cause, text: "the password has changed", notification: cease(packet.BGP_ERROR_SUB_OTHER_CONFIGURATION_CHANGE)}
	case causeReplaced:
		return &failure{cause: cause, text: "the router opened another connection"}
	}
	return &failure{cause: causeConfigured, text: "the configuration of the session has changed",
		notification: cease(packet.BGP_ERROR_SUB_OTHER_CONFIGURATION_CHANGE)}
}

// held is why the session has to be down.
func (t *target) held() *failure {
	switch {
	case t.down != "":
		return &failure{cause: causeBFD, text: t.down, notification: cease(bfdDown), final: true}
	case t.unfit != "":
		return &failure{cause: causeConfigured, text: t.unfit, notification: cease(packet.BGP_ERROR_SUB_ADMINISTRATIVE_SHUTDOWN), final: true}
	case t.unheard != "":
		return &failure{cause: causeConnection, text: t.unheard}
	}
	return nil
}

// encode returns the message for a router that agreed on n, nil if it is sent none. If a NOTIFICATION leaves the
// routes in place at this router, one that must not is wrapped in a hard reset (RFC 8538
// section 3).
func (f *failure) encode(n negotiated) []byte {
	if f.notification == nil || f.silent && n.restart {
		return nil
	}
	m := *f.notification
	if f.final && n.notify {
		m = *notification(packet.BGP_ERROR_CEASE, packet.BGP_ERROR_SUB_HARD_RESET, append([]byte{m.ErrorCode, m.ErrorSubcode}, m.Data...))
	}
	b, err := packet.NewBGPNotificationMessage(m.ErrorCode, m.ErrorSubcode, m.Data).Serialize()
	if err != nil {
		panic(fmt.Sprintf("encode NOTIFICATION %v: %v", m, err)) // they are all ours
	}
	return b
}

// notified is a NOTIFICATION of the router, in words.
func notified(body []byte) *failure {
	return &failure{cause: causeNotification, text: "the router ended the session: " + notificationText(body[0], body[1], body[2:])}
}

// notificationText explains what a NOTIFICATION means, and what to look at.
func notificationText(code, subcode uint8, data []byte) string {
	text := map[[2]uint8]string{
		{packet.BGP_ERROR_OPEN_MESSAGE_ERROR, packet.BGP_ERROR_SUB_BAD_PEER_AS}: "it expects another AS number of this node (bad " +
			"peer AS)",
		{packet.BGP_ERROR_OPEN_MESSAGE_ERROR, packet.BGP_ERROR_SUB_BAD_BGP_IDENTIFIER}:     "it does not accept this node's router ID",
		{packet.BGP_ERROR_OPEN_MESSAGE_ERROR, packet.BGP_ERROR_SUB_UNACCEPTABLE_HOLD_TIME}: "it does not accept the hold time",
		{packet.BGP_ERROR_OPEN_MESSAGE_ERROR, packet.BGP_ERROR_SUB_UNSUPPORTED_CAPABILITY}: "it lacks a capability or an address family",
		{packet.BGP_ERROR_CEASE, packet.BGP_ERROR_SUB_MAXIMUM_NUMBER_OF_PREFIXES_REACHED}:  "it was sent more prefixes than it allows",
		{packet.BGP_ERROR_CEASE, packet.BGP_ERROR_SUB_ADMINISTRATIVE_SHUTDOWN}:             "its administrator shut the session down",
		{packet.BGP_ERROR_CEASE, packet.BGP_ERROR_SUB_PEER_DECONFIGURED}:                   "this node is no longer configured there",
		{packet.BGP_ERROR_CEASE, packet.BGP_ERROR_SUB_ADMINISTRATIVE_RESET}:                "its administrator reset the session",
		{packet.BGP_ERROR_CEASE, packet.BGP_ERROR_SUB_CONNECTION_REJECTED}: "it rejects the connection, as if this node " +
			"were not configured there",
		{packet.BGP_ERROR_CEASE, packet.BGP_ERROR_SUB_OTHER_CONFIGURATION_CHANGE}:      "its configuration changed",
		{packet.BGP_ERROR_CEASE, packet.BGP_ERROR_SUB_CONNECTION_COLLISION_RESOLUTION}: "it has another connection with this node",
		{packet.BGP_ERROR_CEASE, packet.BGP_ERROR_SUB_OUT_OF_RESOURCES}:                "it is out of resources",
		{packet.BGP_ERROR_CEASE, packet.BGP_ERROR_SUB_HARD_RESET}:                      "hard reset",
		{packet.BGP_ERROR_CEASE, bfdDown}:                                              "its BFD session with this node went down",
		{packet.BGP_ERROR_HOLD_TIMER_EXPIRED, 0}:                                       "it did not hear this node within the hold time",
	}[[2]uint8{code, subcode}]
	if text == "" {
		text = map[uint8]string{
			packet.BGP_ERROR_MESSAGE_HEADER_ERROR: "message header error",
			packet.BGP_ERROR_OPEN_MESSAGE_ERROR:   "OPEN message error",
			packet.BGP_ERROR_UPDATE_MESSAGE_ERROR: "UPDATE message error",
			packet.BGP_ERROR_FSM_ERROR:            "finite state machine error",
			packet.BGP_ERROR_CEASE:                "cease",
		}[code]
	}
	text = strings.TrimSpace(fmt.Sprintf("%s [NOTIFICATION %d/%d]", text, code, subcode))
	if code != packet.BGP_ERROR_CEASE {
		return text
	}
	switch subcode {
	case packet.BGP_ERROR_SUB_HARD_RESET:
		if len(data) >= 2 && data[1] != packet.BGP_ERROR_SUB_HARD_RESET { // the wrapped one has the cause (RFC 8538 section 3)
			return notificationText(data[0], data[1], data[2:]) + ", " + text
		}
	case packet.BGP_ERROR_SUB_ADMINISTRATIVE_SHUTDOWN, packet.BGP_ERROR_SUB_ADMINISTRATIVE_RESET:
		if communication, _, ok := cut(data, 1); ok && len(communication) > 0 { // RFC 9003
			return text + fmt.Sprintf(", with the message %q", printable(communication))
		}
	}
	return text
}

// printable returns text of the router in a form that is safe in logs and Events.
func printable(b []byte) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return unicode.ReplacementChar
	}, strings.ToValidUTF8(string(b), string(unicode.ReplacementChar)))
}

// connectFailure returns why there is no connection.
func connectFailure(t *target, err error) *failure {
	hint := ""
	switch {
	case errors.Is(err, unix.ECONNREFUSED):
		hint = "nobody listens there: BGP does not run on the router, or does not know this node's address"
	case isTimeout(err) && t.password != "":
		hint = "the router is unreachable, or has another TCP-MD5 password or none (suspected: a wrong password is never answered)"
	case isTimeout(err) && t.Peer.TTLSecurity > 0:
		hint = "the router is unreachable, expects a TCP-MD5 password, or has no TTL security"
	case isTimeout(err):
		hint = "the router is unreachable, drops the packets, or expects a TCP-MD5 password"
	case (errors.Is(err, unix.EHOSTUNREACH) || errors.Is(err, unix.ETIMEDOUT)) && t.ttl() == 1:
		hint = "the router is down, or not on a segment of this node: an external peer that is farther away needs multihop"
	case errors.Is(err, unix.EADDRNOTAVAIL):
		hint = "the node does not have the source address"
	case errors.Is(err, unix.ENETUNREACH):
		hint = "the node has no route there"
	}
	text := fmt.Sprintf("connect: %v", plain(err))
	if hint != "" {
		text += ": " + hint
	}
	return &failure{cause: causeConnection, text: text}
}

// brokenConnection returns why a connection that was there ended.
func brokenConnection(err error) *failure {
	f := &failure{}
	switch {
	case errors.As(err, &f):
		return f
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return &failure{cause: causeConnection, text: "the router closed the connection without giving a reason"}
	case errors.Is(err, unix.ECONNRESET):
		return &failure{cause: causeConnection,
			text: "the router reset the connection without giving a reason: it restarted, or does not accept this node as a peer"}
	}
	return &failure{cause: causeConnection, text: fmt.Sprintf("the connection broke: %v", plain(err))}
}

// plain returns a network error without the addresses, whose ports differ at every attempt.
func plain(err error) error {
	var call *os.SyscallError
	var operation *net.OpError
	switch {
	case errors.As(err, &call):
		return call.Err
	case isTimeout(err):
		return errors.New("no answer")
	case errors.As(err, &operation):
		return operation.Err
	}
	return err
}

func isTimeout(err error) bool {
	var n net.Error
	return errors.Is(err, context.DeadlineExceeded) || errors.As(err, &n) && n.Timeout()
}
