package slot

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"strings"
	"unicode"

	"github.com/edgebake/edgebake/ondisk"
)

// A stick with an Inventory may have a claims file, in which each machine records the Site that it
// uses, so that a second machine that matches the Site detects the first. The file is preallocated,
// and each record is one sector, written in place. Damaged records are ignored.

// Claim records that a machine uses a Site of an Inventory.
type Claim struct {
	Site     string   `json:"site"`
	MACs     []string `json:"macs,omitempty"`
	Serial   string   `json:"serial,omitempty"`
	UUID     string   `json:"uuid,omitempty"`
	AssetTag string   `json:"assetTag,omitempty"`
}

// ErrNoClaims means that a stick has no claims file, or no space in it.
var ErrNoClaims = errors.New("no space in " + ondisk.SlotClaims + " for the claim of this machine")

const (
	claimSize = 512
	claimHead = "edgebake claim 1 "
	// maxClaims limits the number of records read from an untrusted stick.
	maxClaims = 8192
	maxCards  = 8 // MACs per claim
)

// encode returns a record, with at most maxCards MACs.
func (c Claim) encode() ([]byte, error) {
	c.MACs = c.MACs[:min(len(c.MACs), maxCards)]
	b, err := json.Marshal(c)
	if err != nil {
		return nil, fmt.Errorf("encoding a claim: %w", err)
	}
	sum := sha256.Sum256(b)
	b = fmt.Appendf(nil, "%s%x\n%s\n", claimHead, sum[:8], b)
	if len(b) > claimSize {
		return nil, fmt.Errorf("encoding a claim: it has %d bytes, but there is space for only %d", len(b), claimSize)
	}
	return append(b, make([]byte, claimSize-len(b))...), nil
}

// decodeClaim decodes a record. ok is false if b is not a valid record.
func decodeClaim(b []byte) (c Claim, ok bool) {
	rest, ok := bytes.CutPrefix(b, []byte(claimHead))
	if !ok || len(rest) < 17 || rest[16] != '\n' {
		return c, false
	}
	doc, _, ok := bytes.Cut(rest[17:], []byte("\n"))
	sum := sha256.Sum256(doc)
	if !ok || hex.EncodeToString(sum[:8]) != string(rest[:16]) || json.Unmarshal(doc, &c) != nil || len(c.MACs) > maxCards {
		return c, false
	}
	// Reject control characters, because the values are printed.
	for _, s := range append([]string{c.Site, c.Serial, c.UUID, c.AssetTag}, c.MACs...) {
		if len(s) > 255 || strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsPrint(r) }) {
			return c, false
		}
	}
	return c, c.Site != ""
}

// claims returns the offsets of all records on the device, or nil if there is no claims file.
func (in *reader) claims() ([]int64, error) {
	e, err := in.fat.Stat(ondisk.SlotClaims)
	if errors.Is(err, fs.ErrNotExist) || err == nil && e.Dir {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	extents, err := in.fat.Extents(ondisk.SlotClaims)
	if err != nil {
		return nil, err
	}
	var at []int64
	for _, x := range extents {
		for off := int64(0); off+claimSize <= x.Len && len(at) < maxClaims; off += claimSize {
			at = append(at, x.Off+off)
		}
	}
	return at, nil
}

// ReadClaims returns the claims on a stick, in any order.
func ReadClaims(r io.ReaderAt) ([]Claim, error) {
	claims, _, err := readClaims(r, "")
	if err != nil {
		return nil, fmt.Errorf("reading the claims: %w", err)
	}
	return claims, nil
}

// readClaims returns the claims, and the offset at which to write a claim of site: that of the
// Site's record, or else of a free record, or else -1.
func readClaims(r io.ReaderAt, site string) (claims []Claim, place int64, err error) {
	in, err := open(r)
	if err != nil {
		return nil, -1, err
	}
	at, err := in.claims()
	if err != nil {
		return nil, -1, err
	}
	free, own := int64(-1), int64(-1)
	b := make([]byte, claimSize)
	for _, off := range at {
		if _, err := r.ReadAt(b, off); err != nil {
			return nil, -1, err
		}
		c, ok := decodeClaim(b)
		switch {
		case !ok && free < 0:
			free = off
		case ok && c.Site == site:
			own = off
		}
		if ok {
			claims = append(claims, c)
		}
	}
	if own >= 0 {
		return claims, own, nil
	}
	return claims, free, nil
}

// WriteClaim writes a claim. It replaces an existing claim of the same Site. If there is no space,
// the error is ErrNoClaims.
func WriteClaim(f Device, c Claim) error {
	b, err := c.encode()
	if err != nil {
		return err
	}
	_, at, err := readClaims(f, c.Site)
	if err == nil && at < 0 {
		return ErrNoClaims
	}
	if err == nil {
		_, err = f.WriteAt(b, at)
	}
	if err == nil {
		err = f.Sync()
	}
	if err != nil {
		return fmt.Errorf("writing a claim: %w", err)
	}
	return nil
}

// ClaimsFile returns the initial content of a claims file for this number of machines.
func ClaimsFile(machines int) []byte {
	return make([]byte, max(64, machines+machines/4)*claimSize)
}
