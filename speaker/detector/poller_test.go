package detector

import (
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// It is time when the deadline has come, or while the socket has a packet.
func TestAlarm(t *testing.T) {
	conn, err := net.ListenPacket("udp", "127.0.0.1:0")
	require.NoError(t, err)
	defer conn.Close()
	socket, err := conn.(*net.UDPConn).SyscallConn()
	require.NoError(t, err)
	var a *alarm
	require.NoError(t, socket.Control(func(fd uintptr) { a, err = newAlarm(int(fd)) }))
	require.NoError(t, err)
	defer a.close()
	wait := func(d time.Duration) time.Duration {
		began := time.Now()
		require.NoError(t, a.wait(began.Add(d)))
		return time.Since(began)
	}
	send := func() {
		_, err := conn.WriteTo([]byte("beat"), conn.LocalAddr())
		assert.NoError(t, err)
	}

	for range 3 {
		assert.GreaterOrEqual(t, wait(10*time.Millisecond), 10*time.Millisecond)
	}
	wait(-time.Second)
	for range 3 {
		sending := time.AfterFunc(10*time.Millisecond, send)
		assert.Less(t, wait(time.Hour), time.Minute, "a packet comes")
		sending.Stop()
		assert.Less(t, wait(time.Hour), time.Minute, "it has not been read")
		_, _, err = conn.ReadFrom(make([]byte, 9))
		require.NoError(t, err)
		assert.GreaterOrEqual(t, wait(10*time.Millisecond), 10*time.Millisecond, "it has been read")
	}
}
