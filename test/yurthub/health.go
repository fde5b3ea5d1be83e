package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/url"
	"sync"
	"time"
)

// health probes every server by renewing the node's lease. A server becomes unhealthy after one
// failed probe, and healthy again after two successful ones. In cloud mode it probes no server.
type health struct {
	o      *options
	client *http.Client

	mu      sync.Mutex
	healthy map[string]bool
	good    map[string]int
	changed chan struct{} // closed and replaced when any server becomes healthy
	next    int
}

func newHealth(o *options, id *identity) *health {
	h := &health{
		o: o, client: &http.Client{Timeout: o.timeout, Transport: id.transport("")},
		healthy: map[string]bool{}, good: map[string]int{}, changed: make(chan struct{}),
	}
	for _, s := range o.servers {
		h.healthy[s.Host] = o.workingMode == "cloud"
	}
	return h
}

func (h *health) run(ctx context.Context) {
	if h.o.workingMode == "cloud" {
		return
	}
	first := true
	for {
		var wg sync.WaitGroup
		for _, s := range h.o.servers {
			wg.Go(func() { h.note(s.Host, h.probe(ctx, s), first) })
		}
		wg.Wait()
		first = false
		select {
		case <-ctx.Done():
			return
		case <-time.After(h.o.interval):
		}
	}
}

func (h *health) note(host string, err error, first bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err != nil {
		if h.healthy[host] {
			log.Printf("server %s is unhealthy: %v", host, err)
		}
		h.healthy[host], h.good[host] = false, 0
		return
	}
	h.good[host]++
	if !h.healthy[host] && (first || h.good[host] >= h.o.healthyThreshold) {
		log.Printf("server %s is healthy", host)
		h.healthy[host] = true
		close(h.changed)
		h.changed = make(chan struct{})
	}
}

// probe renews the lease of the node, or creates it.
func (h *health) probe(ctx context.Context, s *url.URL) (err error) {
	for range h.o.retries {
		if err = h.renew(ctx, s); err == nil {
			return nil
		}
	}
	return err
}

func (h *health) renew(ctx context.Context, s *url.URL) error {
	const dir = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
	var lease map[string]any
	status, err := h.call(ctx, http.MethodGet, s.JoinPath(dir, h.o.nodeName), nil, &lease)
	if err != nil {
		return err
	}
	spec := map[string]any{
		"holderIdentity": h.o.nodeName, "leaseDurationSeconds": 40,
		"renewTime": time.Now().UTC().Format("2006-01-02T15:04:05.000000Z"),
	}
	method, u := http.MethodPut, s.JoinPath(dir, h.o.nodeName)
	if status == http.StatusNotFound {
		method, u = http.MethodPost, s.JoinPath(dir)
		lease = map[string]any{
			"apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
			"metadata": map[string]any{"name": h.o.nodeName, "namespace": "kube-node-lease"},
		}
	}
	lease["spec"] = spec
	status, err = h.call(ctx, method, u, lease, nil)
	// On a conflict another probe was faster, but the server has answered.
	if err == nil && status >= 300 && status != http.StatusConflict {
		err = fmt.Errorf("renewing the lease: status %d", status)
	}
	return err
}

func (h *health) call(ctx context.Context, method string, u *url.URL, in, out any) (int, error) {
	b, err := json.Marshal(in)
	if err != nil {
		return 0, err
	}
	req, err := http.NewRequestWithContext(ctx, method, u.String(), bytes.NewReader(b))
	if err != nil {
		return 0, err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("User-Agent", "yurthub-stand-in")
	resp, err := h.client.Do(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	b, err = io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	if err != nil {
		return 0, err
	}
	if resp.StatusCode >= 500 {
		return resp.StatusCode, fmt.Errorf("%s %s: %s", method, u.Path, resp.Status)
	}
	if out != nil && resp.StatusCode < 300 {
		return resp.StatusCode, json.Unmarshal(b, out)
	}
	return resp.StatusCode, nil
}

// pick returns a healthy server, or nil.
func (h *health) pick() *url.URL {
	h.mu.Lock()
	defer h.mu.Unlock()
	n := len(h.o.servers)
	start := 0
	if h.o.lbMode == "rr" {
		start = h.next
		h.next = (h.next + 1) % n
	}
	for i := range n {
		if s := h.o.servers[(start+i)%n]; h.healthy[s.Host] {
			return s
		}
	}
	return nil
}

// online returns a channel that is closed when a server becomes healthy.
func (h *health) online() <-chan struct{} {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.changed
}
