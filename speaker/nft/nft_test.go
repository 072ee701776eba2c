package nft

import (
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/testnet"
)

// A line keeps its socket, gives each change the whole time, and begins anew when the socket is closed, or when a change
// has failed.
func TestLine(t *testing.T) {
	t.Parallel()
	require.NoError(t, testnet.NewHost(t, "node").Do(func() error {
		var l Line
		defer l.End()
		change := func() Conn {
			c, err := l.Open()
			require.NoError(t, err)
			c.AddTable(&nftables.Table{Name: "a", Family: nftables.TableFamilyIPv4})
			require.NoError(t, c.InTime().Flush())
			return c
		}
		first := change()
		require.NoError(t, first.Socket.SetDeadline(time.Now().Add(-time.Hour)))
		require.Same(t, first.Socket, change().Socket, "its deadline has passed")
		require.NoError(t, first.Socket.Close())
		second := change()
		require.NotSame(t, first.Socket, second.Socket)

		second.AddChain(&nftables.Chain{Name: "c", Table: &nftables.Table{Name: "b", Family: nftables.TableFamilyIPv4}})
		require.Error(t, second.Flush(), "there is no such table")
		l.End()
		l.End()
		require.NotSame(t, second.Socket, change().Socket)
		return nil
	}))
}
