package guard

import (
	"bytes"
	"encoding/hex"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// The two examples of the specification of XAES-256-GCM, of which one has a carry.
func TestExamplesOfTheSpecification(t *testing.T) {
	t.Parallel()
	for _, x := range []struct {
		key     byte
		context string
		sealed  string
	}{
		{1, "", "ce546ef63c9cc60765923609b33a9a1974e96e52daf2fcf7075e2271"},
		{3, "c2sp.org/XAES-256-GCM", "986ec1832593df5443a179437fd083bf3fdb41abd740a21f71eb769d"},
	} {
		sealed, err := hex.DecodeString(x.sealed)
		require.NoError(t, err)
		plain, err := open([][]byte{bytes.Repeat([]byte{x.key}, 32)}, append([]byte("ABCDEFGHIJKLMNOPQRSTUVWX"), sealed...), []byte(x.context))
		require.NoError(t, err)
		assert.Equal(t, "XAES-256-GCM", string(plain))
	}
}

// A key is used for one message: of two, neither their salts nor their nonces are equal, and
// one's tag is not valid with the other's salt.
func TestEachMessageHasItsKey(t *testing.T) {
	t.Parallel()
	keys := theKeys()
	a, err := seal(nil, keys, []byte("text"), forPacket)
	require.NoError(t, err)
	b, err := seal(nil, keys, []byte("text"), forPacket)
	require.NoError(t, err)
	require.Len(t, a, len("text")+Overhead)
	assert.NotEqual(t, a[:saltSize], b[:saltSize])
	assert.NotEqual(t, a[saltSize:2*saltSize], b[saltSize:2*saltSize])
	_, err = open(keys, append(bytes.Clone(b[:saltSize]), a[saltSize:]...), forPacket)
	require.ErrorIs(t, err, errKey)
	for n := range Overhead + 1 {
		_, err = open(keys, a[:n], forPacket)
		require.ErrorIs(t, err, errKey)
	}
}
