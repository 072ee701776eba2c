package peering_test

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/peering"
)

// told is a channel of Events.
type told chan string

func (t told) Event(object runtime.Object, eventType, reason, message string) {
	t <- eventType + " " + object.(metav1.Object).GetName() + " " + reason + ": " + message
}

func lease(node string, sessions ...peering.Session) *coordinationv1.Lease {
	return &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{
		Namespace: "lodestone-system", Name: annotation.SpeakerLeasePrefix + node,
		Labels:      map[string]string{annotation.LabelComponent: annotation.ComponentSpeaker},
		Annotations: peering.Annotations(sessions),
	}}
}

func TestSessionsThatComeAndGoAreEvents(t *testing.T) {
	events := make(told, 100)
	client := fake.NewClientset(lease("n0", peering.Session{Peer: "old", Message: "refused"}))
	n, err := peering.NewNarrator(client, "lodestone-system", events)
	require.NoError(t, err)
	ended := make(chan error)
	go func() { ended <- n.Run(t.Context()) }()
	t.Cleanup(func() { <-ended })

	say := func(s peering.Session) {
		s.Peer, s.Router = "tor", netip.MustParseAddr("203.0.113.254")
		_, err := client.CoordinationV1().Leases("lodestone-system").Update(t.Context(), lease("n1", s), metav1.UpdateOptions{})
		require.NoError(t, err)
	}
	_, err = client.CoordinationV1().Leases("lodestone-system").Create(t.Context(), lease("n1"), metav1.CreateOptions{})
	require.NoError(t, err)
	for try := 0; len(events) == 0; try++ { // until the watch runs
		say(peering.Session{Since: morning, Message: fmt.Sprint("try ", try)})
		time.Sleep(time.Millisecond)
	}
	require.Contains(t, <-events, `Warning n1 BGPSessionDown: no BGP session with peer "tor" (203.0.113.254): try `)
	say(peering.Session{Since: morning, Message: "hold timer expired"})
	require.Eventually(t, func() bool {
		return <-events == `Warning n1 BGPSessionDown: no BGP session with peer "tor" (203.0.113.254): hold timer expired`
	}, 10*time.Second, time.Millisecond)
	say(peering.Session{Since: morning, Message: "hold timer expired"}) // nothing new
	say(peering.Session{Established: true, Since: morning})
	require.Equal(t, `Normal n1 BGPSessionUp: BGP session with peer "tor" (203.0.113.254) is established`, <-events)
	say(peering.Session{Established: true, Since: morning, BFD: "Up"})       // nothing new
	say(peering.Session{Established: true, Since: morning.Add(time.Minute)}) // down and up in between
	require.Equal(t, `Normal n1 BGPSessionUp: BGP session with peer "tor" (203.0.113.254) is established`, <-events)
	say(peering.Session{Since: morning, Message: "the peer: Cease, administrative shutdown"})
	require.Equal(t, `Warning n1 BGPSessionDown: no BGP session with peer "tor" (203.0.113.254): the peer: Cease, administrative shutdown`, <-events)
	require.Empty(t, events)
}
