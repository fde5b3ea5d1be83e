package etcdmember

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// ReadLog reads the IDs of the member and of its cluster, as etcd's API formats them, from the
// write-ahead log in dir (…/member/wal). wal reports whether a log exists, even without IDs.
func ReadLog(dir string) (wal bool, member, cluster string, err error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return false, "", "", nil
	}
	if err != nil {
		return false, "", "", err
	}
	slices.SortFunc(entries, func(a, b os.DirEntry) int { return -cmp.Compare(a.Name(), b.Name()) })
	for _, en := range entries { // newest first
		if !strings.HasSuffix(en.Name(), ".wal") {
			continue
		}
		wal = true
		head, err := readHead(filepath.Join(dir, en.Name()))
		if err != nil {
			return true, "", "", err
		}
		if member, cluster, ok := metadata(head); ok {
			return true, strconv.FormatUint(member, 10), strconv.FormatUint(cluster, 10), nil
		}
	}
	return wal, "", "", nil
}

func readHead(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	head := make([]byte, 512)
	n, err := io.ReadFull(f, head)
	if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
		return nil, fmt.Errorf("reading %s: %w", path, err)
	}
	return head[:n], nil
}

// metadataRecord is the type of the record with the IDs of the member and the cluster.
const metadataRecord = 1

// metadata finds the IDs in the first records of a log. A record consists of a length, which also
// encodes the padding, and a protobuf message with a type, a checksum and data.
func metadata(head []byte) (member, cluster uint64, ok bool) {
	for len(head) >= 8 {
		frame := binary.LittleEndian.Uint64(head)
		size, padding := frame&(1<<56-1), uint64(0)
		if frame>>63 == 1 {
			padding = frame >> 56 & 7
		}
		head = head[8:]
		if size == 0 || size > uint64(len(head)) {
			return 0, 0, false
		}
		numbers, data := fields(head[:size])
		if numbers[1] == metadataRecord {
			ids, _ := fields(data[3])
			return ids[1], ids[2], ids[1] != 0 && ids[2] != 0
		}
		head = head[min(size+padding, uint64(len(head))):]
	}
	return 0, 0, false
}

// fields returns the numbers and byte strings of a protobuf message, by field number. It stops at
// the first field that it cannot decode.
func fields(message []byte) (numbers map[uint64]uint64, data map[uint64][]byte) {
	numbers, data = map[uint64]uint64{}, map[uint64][]byte{}
	next := func() (uint64, bool) {
		v, n := binary.Uvarint(message)
		if n <= 0 {
			return 0, false
		}
		message = message[n:]
		return v, true
	}
	for len(message) > 0 {
		tag, ok := next()
		if !ok {
			break
		}
		v, ok := next()
		switch {
		case !ok:
			return numbers, data
		case tag&7 == 0:
			numbers[tag>>3] = v
		case tag&7 == 2 && v <= uint64(len(message)):
			data[tag>>3], message = message[:v], message[v:]
		default:
			return numbers, data
		}
	}
	return numbers, data
}
