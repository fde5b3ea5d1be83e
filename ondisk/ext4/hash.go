package ext4

import "math/bits"

// nameHash returns the half-MD4 hash by which a directory index is ordered ("Hash Tree
// Directories"). It treats names as unsigned bytes. The lowest bit is 0; in an index entry, a 1
// means that the previous block has names of the same hash.
func nameHash(seed [16]byte, name string) uint32 {
	var state [4]uint32
	for i := range state {
		state[i] = le.Uint32(seed[4*i:])
	}
	for rest := name; len(rest) > 0; rest = rest[min(len(rest), 32):] {
		halfMD4(&state, hashBlock(rest))
	}
	h := state[1] &^ 1
	if h == 0xfffffffe { // the kernel reserves this value for "no more entries"
		h = 0xfffffffc
	}
	return h
}

// hashBlock packs up to 32 bytes of s into eight big-endian words. Missing bytes are filled with
// the length of s.
func hashBlock(s string) (words [8]uint32) {
	fill := uint32(len(s)) & 0xff * 0x01010101
	s = s[:min(len(s), 32)]
	for i := range words {
		words[i] = fill
		part := s[min(len(s), 4*i):min(len(s), 4*i+4)]
		for j := range len(part) {
			words[i] = words[i]<<8 | uint32(part[j])
		}
	}
	return words
}

// halfMD4 is the transform of MD4 (RFC 1320) with half of the steps in each of its three rounds.
func halfMD4(state *[4]uint32, in [8]uint32) {
	choose := func(x, y, z uint32) uint32 { return x&y | ^x&z }
	majority := func(x, y, z uint32) uint32 { return x&y | x&z | y&z }
	parity := func(x, y, z uint32) uint32 { return x ^ y ^ z }
	rounds := [3]struct {
		mix   func(x, y, z uint32) uint32
		add   uint32
		order [8]int
		rot   [4]int
	}{
		{choose, 0, [8]int{0, 1, 2, 3, 4, 5, 6, 7}, [4]int{3, 7, 11, 19}},
		{majority, 0x5a827999, [8]int{1, 3, 5, 7, 0, 2, 4, 6}, [4]int{3, 5, 9, 13}},
		{parity, 0x6ed9eba1, [8]int{3, 7, 2, 6, 1, 5, 0, 4}, [4]int{3, 9, 11, 15}},
	}
	a, b, c, d := state[0], state[1], state[2], state[3]
	for _, r := range rounds {
		for i, word := range r.order {
			a = bits.RotateLeft32(a+r.mix(b, c, d)+in[word]+r.add, r.rot[i%4])
			a, b, c, d = d, a, b, c
		}
	}
	state[0] += a
	state[1] += b
	state[2] += c
	state[3] += d
}
