//go:build !linux

package ipvs

import (
	"net"
	"os"
)

type quietConn struct{ net.Conn }

func quiet(nc net.Conn) *quietConn { return nil }

func pread(f *os.File, b []byte, off int64) (int, error) { return f.ReadAt(b, off) }

func quietAlarms() (alarms, func()) { return runtimeAlarm, func() {} }
