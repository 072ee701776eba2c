package guard

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
)

// Messages are sealed by XAES-256-GCM (C2SP): AES-256-GCM with a key for each message, which is derived
// from the speakers' key and the first half of a random nonce.
//
// With AES-256-GCM alone and random nonces, a key is safe for 2^32 messages, which 1,000 speakers send in
// 30 hours. Nonces of twice the length are safe for 2^80.

// saltSize is the length of the first half of the nonce.
const saltSize = 12

// seal appends b, sealed with the first key, to the prefix.
func seal(prefix []byte, keys [][]byte, b, context []byte) ([]byte, error) {
	if len(keys) == 0 {
		return nil, errKey
	}
	var salt [saltSize]byte
	rand.Read(salt[:]) //nolint:errcheck // it never fails
	gcm, err := gcmOf(keys[0], salt)
	if err != nil {
		return nil, err
	}
	return gcm.Seal(append(prefix, salt[:]...), nil, b, context), nil
}

// open returns what was sealed with one of the keys.
func open(keys [][]byte, sealed, context []byte) ([]byte, error) {
	if len(sealed) < Overhead {
		return nil, errKey
	}
	for _, k := range keys {
		gcm, err := gcmOf(k, [saltSize]byte(sealed))
		if err != nil {
			return nil, err
		}
		if plain, err := gcm.Open(nil, nil, sealed[saltSize:], context); err == nil {
			return plain, nil
		}
	}
	return nil, errKey
}

// gcmOf returns the cipher for messages with the salt. It writes the second half of the nonce before the
// ciphertext.
func gcmOf(key []byte, salt [saltSize]byte) (cipher.AEAD, error) {
	block, err := aes.NewCipher(key)
	if err != nil {
		return nil, err //nolint:wrapcheck // it names the length
	}
	// The key is derived by NIST SP 800-108r1: the CMAC of one block of a counter, a label and the salt.
	// The CMAC of one block is the encryption of the block combined with k1.
	var k1 [aes.BlockSize]byte
	block.Encrypt(k1[:], k1[:])
	carry := k1[0] >> 7 * 0x87
	for i := range len(k1) - 1 {
		k1[i] = k1[i]<<1 | k1[i+1]>>7
	}
	k1[len(k1)-1] = k1[len(k1)-1]<<1 ^ carry
	var derived [2 * aes.BlockSize]byte
	for i := range 2 {
		half := derived[i*aes.BlockSize:][:aes.BlockSize]
		copy(half, []byte{0, byte(i + 1), 'X', 0})
		copy(half[4:], salt[:])
		for j := range half {
			half[j] ^= k1[j]
		}
		block.Encrypt(half, half)
	}
	if block, err = aes.NewCipher(derived[:]); err != nil {
		return nil, err //nolint:wrapcheck // it names the length
	}
	return cipher.NewGCMWithRandomNonce(block) //nolint:wrapcheck // of AES there is none
}
