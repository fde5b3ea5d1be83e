package servercert

import (
	"crypto/tls"
	"time"
)

// MaxSessionAge limits how long after a full handshake its session is resumed. kube-apiserver may
// load a new certificate at any time and still resume old sessions; only a full handshake shows the
// new certificate.
const MaxSessionAge = time.Hour

// SessionCache keeps the last TLS session with one API server. Unlike crypto/tls's own caches, it
// keeps the session even after a failed handshake.
type SessionCache struct {
	tls.ClientSessionCache
	Began time.Time // of the full handshake, or slightly earlier
}

// NewSessionCache returns a cache without a session.
func NewSessionCache() *SessionCache {
	return &SessionCache{tls.NewLRUClientSessionCache(1), time.Now()}
}

// Put stores a session. It ignores the removal of one (nil).
func (c *SessionCache) Put(key string, session *tls.ClientSessionState) {
	if session != nil {
		c.ClientSessionCache.Put(key, session)
	}
}

// Expired reports whether a new cache must replace c, so that a full handshake follows.
func (c *SessionCache) Expired() bool { return time.Since(c.Began) > MaxSessionAge }
