package membership

import (
	"bytes"
	"crypto/hkdf"
	"crypto/sha256"
	"errors"
	"fmt"
)

// minKey is the shortest text that is taken for a key.
const minKey = 16

// ErrNoKey says that there is no key.
var ErrNoKey = errors.New("no membership key: speakers talk to each other only encrypted; put at least 16 random characters into the Secret")

// Key derives the encryption key that all speakers share from a text, white
// space around it aside.
func Key(text []byte) ([]byte, error) {
	text = bytes.TrimSpace(text)
	switch {
	case len(text) == 0:
		return nil, ErrNoKey
	case len(text) < minKey:
		return nil, fmt.Errorf("membership key of %d bytes, at least %d", len(text), minKey)
	}
	return hkdf.Key(sha256.New, text, nil, "lodestone membership", 32) // AES-256
}
