package lab

import (
	"context"
	"encoding/binary"
	"errors"
	"net"
	"time"
)

const (
	ntpPacket = 48 // size in bytes without extensions and authentication (RFC 5905, 7.3)
	ntpClient = 3
	ntpServer = 4
	// ntpEpoch is 1 January 1900, expressed in seconds before 1970.
	ntpEpoch = 2208988800
)

// ServeTime serves this host's time by NTP at the namespace's Gateway until the lab is closed.
// Machines in a Lockstep must not use it, because they have another time.
func (l *Lab) ServeTime(ctx context.Context, ns *Namespace) error {
	conn, err := ns.ListenPacket(ctx, "udp", net.JoinHostPort(Gateway, "123"))
	if err != nil {
		return err
	}
	l.onClose(conn.Close)
	go func() {
		for b := make([]byte, 1024); ; {
			n, from, err := conn.ReadFrom(b)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err != nil {
				continue
			}
			if answer := ntpAnswer(b[:n], time.Now()); answer != nil {
				conn.WriteTo(answer, from) // a client that gets no answer asks again
			}
		}
	}()
	return nil
}

// ntpAnswer answers a client's request, or returns nil if question is none. It copies the time in
// the request unchanged, because systemd-timesyncd sends random bits there and expects them in the
// answer.
func ntpAnswer(question []byte, now time.Time) []byte {
	if len(question) < ntpPacket || question[0]&7 != ntpClient {
		return nil
	}
	a := make([]byte, ntpPacket)
	a[0] = question[0]&0o70 | ntpServer // no leap second, and the client's version
	a[1] = 1                            // stratum 1: the server gets its time from no other server
	a[2] = question[2]
	a[3] = 0xec // precision: 2^-20 s
	copy(a[12:], "LOCL")
	copy(a[24:32], question[40:48])
	seconds := uint64(now.Unix()+ntpEpoch) << 32
	stamp := seconds | uint64(now.Nanosecond())<<32/uint64(time.Second)
	for _, at := range []int{16, 32, 40} { // times: last set, received, sent
		binary.BigEndian.PutUint64(a[at:], stamp)
	}
	return a
}
