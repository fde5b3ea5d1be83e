package host

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"time"

	"golang.org/x/net/http/httpproxy"
)

// errPlain: what a machine says of itself is not sent in the clear.
var errPlain = errors.New("only https is used")

// through is a transport by way of the proxy that these environment variables
// name. It ends with its connection: reports are few.
func through(env []string) *http.Transport {
	conf := httpproxy.Config{}
	for _, v := range env {
		switch name, value, _ := strings.Cut(v, "="); name {
		case "HTTP_PROXY":
			conf.HTTPProxy = value
		case "HTTPS_PROXY":
			conf.HTTPSProxy = value
		case "NO_PROXY":
			conf.NoProxy = value
		}
	}
	proxy := conf.ProxyFunc()
	return &http.Transport{
		Proxy:             func(r *http.Request) (*url.URL, error) { return proxy(r.URL) },
		ForceAttemptHTTP2: true, DisableKeepAlives: true,
	}
}

// trust has the transport take no authority but that one.
func trust(t *http.Transport, ca string) error {
	if ca == "" {
		return nil
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM([]byte(ca)) {
		return errors.New("report.caCert is not a certificate")
	}
	t.TLSClientConfig = &tls.Config{RootCAs: roots}
	return nil
}

func post(ctx context.Context, c http.Client, url string, body []byte) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body))
	if err != nil {
		return err
	}
	if req.URL.Scheme != "https" {
		return fmt.Errorf("sending to %s: %w", url, errPlain)
	}
	req.Header.Set("Content-Type", "application/json")
	c.Timeout = 10 * time.Second
	c.CheckRedirect = func(req *http.Request, via []*http.Request) error {
		if req.URL.Scheme != "https" {
			return errPlain
		}
		if len(via) >= 10 {
			return errors.New("it leads from one address to the next")
		}
		return nil
	}
	res, err := c.Do(req)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	if res.StatusCode/100 != 2 {
		return fmt.Errorf("sending to %s: it answered %s", url, res.Status)
	}
	return nil
}
