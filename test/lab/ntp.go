package lab

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"
)

// ServeTime answers NTP at the network's gateway until the lab closes. right is the
// right time where a client's clock says t: machines in lockstep have a time of their
// own.
func (l *Lab) ServeTime(ctx context.Context, ns *Namespace, right func(t time.Time) time.Time) error {
	conn, err := ns.listenPacket(ctx, "udp4", net.JoinHostPort(Gateway, "123"))
	if err != nil {
		return fmt.Errorf("serving time: %w", err)
	}
	l.onClose(conn.Close)
	go func() {
		for {
			var b [512]byte
			n, from, err := conn.ReadFrom(b[:])
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err == nil && n >= ntpSize {
				conn.WriteTo(ntpAnswer(b[:ntpSize], right), from) // lost: the client asks again
			}
		}
	}()
	return nil
}

// ntpSize is the length of RFC 5905's header, without extensions.
const ntpSize = 48

// ntpEra is the beginning of NTP's time in Unix time.
var ntpEra = time.Date(1900, 1, 1, 0, 0, 0, 0, time.UTC).Unix()

func ntpAnswer(question []byte, right func(time.Time) time.Time) []byte {
	sent := question[40:48]
	// timesyncd has nanoseconds where RFC 5905 has fractions of 2^32.
	now := right(time.Unix(int64(binary.BigEndian.Uint32(sent))+ntpEra, int64(binary.BigEndian.Uint32(sent[4:]))%1e9))
	b := make([]byte, ntpSize)
	b[0] = 4<<3 | 4 // version 4, server
	b[1] = 2        // stratum
	b[2] = 6        // poll: 64 s
	b[3] = 0xec     // precision: a microsecond
	copy(b[12:], netip.MustParseAddr("192.0.2.1").AsSlice())
	var stamp [8]byte
	binary.BigEndian.PutUint32(stamp[:], uint32(now.Unix()-ntpEra))
	binary.BigEndian.PutUint32(stamp[4:], uint32(uint64(now.Nanosecond())<<32/1e9))
	copy(b[16:], stamp[:]) // reference
	copy(b[24:], sent)     // origin
	copy(b[32:], stamp[:]) // received
	copy(b[40:], stamp[:]) // sent
	return b
}
