package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// proxy serves kubelet and pods from a healthy server or, if there is none, from the cache.
type proxy struct {
	o      *options
	id     *identity
	health *health
	cache  *cache

	ready    atomic.Pointer[string] // nil when ready, otherwise the reason
	remoteMu sync.Mutex
	remote   map[string]*httputil.ReverseProxy
}

func (p *proxy) missing() string {
	if s := p.ready.Load(); s != nil {
		return *s
	}
	return ""
}

// sync waits until everything that the real program's informers need can be listed. After a restart
// without a reachable server, it uses the cache.
func (p *proxy) sync(ctx context.Context) {
	c := &http.Client{Timeout: 5 * time.Second, Transport: p.id.transport("")}
	need := []struct{ path, missing string }{
		{"/api/v1/namespaces/" + p.o.namespace + "/configmaps", "yurt-hub-cfg configmap is not synced"},
	}
	pools := "v1beta2"
	if p.o.before17 {
		pools = "v1beta1"
	}
	if p.o.enableNodePool {
		need = append(need, struct{ path, missing string }{"/apis/apps.openyurt.io/" + pools + "/nodepools", "resources needed by filters are not synced"})
	}
	for _, n := range need {
		p.ready.Store(&n.missing)
		for !p.synced(ctx, c, n.path) {
			select {
			case <-ctx.Done():
				return
			case <-time.After(time.Second):
			}
		}
	}
	p.ready.Store(nil)
	log.Print("ready")
}

func (p *proxy) synced(ctx context.Context, c *http.Client, path string) bool {
	u := &url.URL{Path: path}
	dir := p.cache.collection("yurthub", u)
	s := p.health.pick()
	if s == nil {
		_, ok, err := p.cache.items(dir)
		return ok && err == nil
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.JoinPath(path).String(), nil)
	if err != nil {
		return false
	}
	resp, err := c.Do(req)
	if err != nil {
		return false
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return err == nil && resp.StatusCode == http.StatusOK && p.cache.putList(dir, b) == nil
}

// serve opens the four ports. It returns when ctx ends or one of them fails.
func (p *proxy) serve(ctx context.Context) error {
	ready := http.NewServeMux()
	ready.HandleFunc("GET /v1/healthz", func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "OK") })
	ready.HandleFunc("GET /v1/readyz", func(w http.ResponseWriter, _ *http.Request) {
		if m := p.missing(); m != "" {
			http.Error(w, m, http.StatusInternalServerError)
			return
		}
		io.WriteString(w, "OK")
	})
	tlsConfig := &tls.Config{Certificates: []tls.Certificate{*p.id.server}, ClientAuth: tls.RequestClientCert}
	addr := func(host string, port int) string { return net.JoinHostPort(host, strconv.Itoa(port)) }
	podAddress := p.o.bindProxy
	if _, err := exec.LookPath("ip"); p.o.dummy && p.o.before17 && err != nil {
		log.Printf("no dummy interface: %v", err)
	} else if p.o.dummy {
		if err := dummyInterface(p.o.dummyName, p.o.dummyIP); err != nil {
			return err
		}
		podAddress = p.o.dummyIP
	}
	type server struct {
		addr    string
		handler http.Handler
		tls     *tls.Config
	}
	servers := []server{
		{addr(podAddress, p.o.tlsPort), p, tlsConfig},
		{addr(p.o.bind, p.o.healthPort), ready, nil},
		{addr(p.o.bindProxy, p.o.proxyPort), p, nil},
	}
	if !p.o.before17 {
		servers = append(servers, server{addr(p.o.nodeIP, p.o.poolPort), p, tlsConfig})
	}
	failed := make(chan error, len(servers))
	for _, s := range servers {
		l, err := net.Listen("tcp", s.addr)
		if err != nil {
			return fmt.Errorf("listening on %s: %w", s.addr, err)
		}
		if s.tls != nil {
			l = tls.NewListener(l, s.tls)
		}
		srv := &http.Server{Handler: s.handler}
		context.AfterFunc(ctx, func() { srv.Close() })
		go func() { failed <- srv.Serve(l) }()
	}
	select {
	case <-ctx.Done():
		return nil
	case err := <-failed:
		return err
	}
}

// component returns the name of a client. Each client has its own part of the cache.
func component(r *http.Request) string {
	name, _, _ := strings.Cut(r.UserAgent(), "/")
	return name
}

func cacheable(r *http.Request) bool {
	switch component(r) {
	case "kubelet", "kube-proxy", "flanneld", "coredns", "yurthub", "raven-agent-ds":
		return r.Method == http.MethodGet
	}
	return false
}

func isWatch(r *http.Request) bool {
	w := r.URL.Query().Get("watch")
	return w == "true" || w == "1"
}

// isCollection reports whether a path has the form of a list's path, not of a single object's.
func isCollection(path string) bool {
	parts := strings.Split(strings.Trim(path, "/"), "/")
	if len(parts) > 0 && parts[0] == "api" {
		parts = parts[min(2, len(parts)):]
	} else {
		parts = parts[min(3, len(parts)):]
	}
	if len(parts) > 2 && parts[0] == "namespaces" {
		parts = parts[2:]
	}
	return len(parts) == 1
}

func (p *proxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if m := p.missing(); m != "" {
		status(w, http.StatusServiceUnavailable, "ServiceUnavailable", m)
		return
	}
	// Answer kubelet's renewals of its lease here, because the health probes renew it.
	if component(r) == "kubelet" && strings.HasPrefix(r.URL.Path, "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/") &&
		r.Method == http.MethodPut && p.o.workingMode == "edge" {
		echo(w, r, http.StatusOK)
		return
	}
	// Before 1.7, yurthub answers lists of Services itself and selects only by name, so kubelet
	// 1.31 and later waits for its list forever.
	if r.URL.Path == "/api/v1/services" && p.o.before17 && strings.Contains(r.URL.Query().Get("fieldSelector"), "spec.") {
		status(w, http.StatusInternalServerError, "InternalError", "spec.clusterIP is not a known field selector")
		return
	}
	s := p.health.pick()
	if s == nil {
		p.local(w, r)
		return
	}
	if cacheable(r) {
		// The cache needs JSON, which every client also accepts.
		r.Header.Set("Accept", "application/json")
	}
	p.backend(s).ServeHTTP(w, r)
}

func (p *proxy) backend(s *url.URL) *httputil.ReverseProxy {
	p.remoteMu.Lock()
	defer p.remoteMu.Unlock()
	if p.remote == nil {
		p.remote = map[string]*httputil.ReverseProxy{}
	}
	if rp := p.remote[s.Host]; rp != nil {
		return rp
	}
	rp := &httputil.ReverseProxy{
		Rewrite:       func(r *httputil.ProxyRequest) { r.SetURL(s); r.Out.Host = s.Host },
		Transport:     p.id.transport(""),
		FlushInterval: -1,
		ModifyResponse: func(resp *http.Response) error {
			r := resp.Request
			if resp.StatusCode != http.StatusOK || !cacheable(r) {
				return nil
			}
			return p.keep(resp, r)
		},
		ErrorHandler: func(w http.ResponseWriter, r *http.Request, err error) {
			status(w, http.StatusBadGateway, "ServiceUnavailable", err.Error())
		},
	}
	p.remote[s.Host] = rp
	return rp
}

// keep copies a response into the cache while it is passed on.
func (p *proxy) keep(resp *http.Response, r *http.Request) error {
	if !strings.HasPrefix(resp.Header.Get("Content-Type"), "application/json") {
		return nil
	}
	if isWatch(r) {
		resp.Body = &watchTee{ReadCloser: resp.Body, line: func(line []byte) {
			if err := p.cache.event(p.cache.collection(component(r), r.URL), line); err != nil {
				log.Printf("keeping an event of %s: %v", r.URL.Path, err)
			}
		}}
		return nil
	}
	b, err := io.ReadAll(resp.Body)
	resp.Body.Close()
	if err != nil {
		return err
	}
	resp.Body = io.NopCloser(bytes.NewReader(b))
	if isCollection(r.URL.Path) {
		return p.cache.putList(p.cache.collection(component(r), r.URL), b)
	}
	return write(p.cache.single(component(r), r.URL), b)
}

// watchTee calls line with each line of a watch, after the client has received it.
type watchTee struct {
	io.ReadCloser
	buf  []byte
	line func([]byte)
}

func (t *watchTee) Read(b []byte) (int, error) {
	n, err := t.ReadCloser.Read(b)
	t.buf = append(t.buf, b[:n]...)
	for {
		i := bytes.IndexByte(t.buf, '\n')
		if i < 0 {
			return n, err
		}
		if i > 0 {
			t.line(t.buf[:i])
		}
		t.buf = t.buf[i+1:]
	}
}

// local answers a request without a server.
func (p *proxy) local(w http.ResponseWriter, r *http.Request) {
	if p.o.workingMode == "cloud" || !strings.HasPrefix(r.URL.Path, "/api") {
		status(w, http.StatusBadRequest, "BadRequest", "no server is reachable, and this request is not served from the cache")
		return
	}
	switch r.Method {
	case http.MethodPost:
		if strings.HasSuffix(r.URL.Path, "/token") {
			p.token(w, r)
			return
		}
		echo(w, r, http.StatusCreated)
	case http.MethodDelete:
		status(w, http.StatusForbidden, "Forbidden", "nothing can be deleted without a server")
	case http.MethodGet:
		p.cached(w, r)
	default:
		status(w, http.StatusBadRequest, "BadRequest", "this request is not served from the cache")
	}
}

func (p *proxy) cached(w http.ResponseWriter, r *http.Request) {
	if !cacheable(r) {
		status(w, http.StatusBadRequest, "BadRequest", "nothing is kept for "+component(r))
		return
	}
	if isWatch(r) {
		p.hold(w, r)
		return
	}
	if isCollection(r.URL.Path) {
		l, ok, err := p.cache.items(p.cache.collection(component(r), r.URL))
		if err != nil || !ok {
			status(w, http.StatusNotFound, "NotFound", fmt.Sprintf("not in the cache: %v", err))
			return
		}
		w.Header().Set("Content-Type", "application/json")
		json.NewEncoder(w).Encode(l)
		return
	}
	b, err := p.getCached(component(r), r.URL)
	if err != nil {
		status(w, http.StatusNotFound, "NotFound", "not in the cache")
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Write(b)
}

// hold keeps a watch open and silent until a server is healthy again. As in the real program, even
// a client that requests the current state first (sendInitialEvents) gets nothing, so a kubelet
// that reads lists in that way gets no list.
func (p *proxy) hold(w http.ResponseWriter, r *http.Request) {
	online := p.health.online()
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusOK)
	if f, ok := w.(http.Flusher); ok {
		f.Flush()
	}
	seconds, _ := strconv.Atoi(r.URL.Query().Get("timeoutSeconds"))
	if seconds <= 0 {
		seconds = 1800
	}
	select {
	case <-r.Context().Done():
	case <-online:
	case <-time.After(time.Duration(seconds) * time.Second):
	}
}

// token returns a service account token with which a pod can start. No server accepts it, and
// kubelet soon requests another one.
func (p *proxy) token(w http.ResponseWriter, _ *http.Request) {
	exp := time.Now().Add(time.Minute)
	part := func(v any) string {
		b, _ := json.Marshal(v)
		return base64.RawURLEncoding.EncodeToString(b)
	}
	token := part(map[string]string{"alg": "none"}) + "." + part(map[string]any{"exp": exp.Unix(), "iss": "stand-in"}) + "."
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusCreated)
	json.NewEncoder(w).Encode(map[string]any{
		"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest",
		"spec":   map[string]any{"audiences": []string{}, "expirationSeconds": 600},
		"status": map[string]any{"token": token, "expirationTimestamp": exp.UTC().Format(time.RFC3339)},
	})
}

func echo(w http.ResponseWriter, r *http.Request, code int) {
	b, err := io.ReadAll(r.Body)
	if err != nil {
		status(w, http.StatusBadRequest, "BadRequest", err.Error())
		return
	}
	w.Header().Set("Content-Type", r.Header.Get("Content-Type"))
	w.WriteHeader(code)
	w.Write(b)
}

// status writes a Kubernetes Status object as the response.
func status(w http.ResponseWriter, code int, reason, message string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	json.NewEncoder(w).Encode(map[string]any{
		"apiVersion": "v1", "kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": message,
	})
}
