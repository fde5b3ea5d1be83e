package servercert

import "crypto/tls"

// SessionCache keeps the last TLS session with one API server. Unlike crypto/tls's own caches, it
// keeps the session even after a failed handshake.
type SessionCache struct{ tls.ClientSessionCache }

// NewSessionCache returns a cache without a session.
func NewSessionCache() SessionCache { return SessionCache{tls.NewLRUClientSessionCache(1)} }

// Put stores a session. It ignores the removal of one (nil).
func (c SessionCache) Put(key string, session *tls.ClientSessionState) {
	if session != nil {
		c.ClientSessionCache.Put(key, session)
	}
}
