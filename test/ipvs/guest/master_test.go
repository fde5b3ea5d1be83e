//go:build linux

package guest

import (
	"bufio"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"
)

// A master simulates a kube-apiserver: TLS and HTTP/2 with the given certificate, and the answer to
// /readyz in its mode file. Without TLS it answers HTTP for lvscare's --health-schem=http. Any
// other connection gets one line of plain text, the master's name, and then silence, which is cheap
// under emulation.

// masterMain is the program of a master. GUEST_MASTER is its directory.
func masterMain() {
	dir := os.Getenv("GUEST_MASTER")
	name := filepath.Base(dir)
	cert, err := tls.LoadX509KeyPair(dir+"/tls.pem", dir+"/tls.pem")
	if err != nil {
		fmt.Println("master:", err)
		os.Exit(1)
	}
	var requests atomic.Int64
	mux := http.NewServeMux()
	readyz := func(w http.ResponseWriter, r *http.Request) {
		requests.Add(1)
		mode, _ := os.ReadFile(dir + "/mode")
		switch m := strings.TrimSpace(string(mode)); m {
		case "":
			io.WriteString(w, "ok")
		case "401":
			http.Error(w, "Unauthorized", http.StatusUnauthorized)
		case "403":
			http.Error(w, "Forbidden", http.StatusForbidden)
		case "429":
			http.Error(w, "Too Many Requests", http.StatusTooManyRequests)
		case "503":
			http.Error(w, "unavailable", http.StatusServiceUnavailable)
		case "drain":
			http.Error(w, "[+]ping ok\n[-]shutdown failed: reason withheld\nreadyz check failed", 500)
		case "hang":
			select {
			case <-r.Context().Done():
			case <-time.After(time.Minute): // as a kube-apiserver does
				http.Error(w, "the request timed out", http.StatusGatewayTimeout)
			}
		}
	}
	mux.HandleFunc("/readyz", readyz)
	mux.HandleFunc("/healthz", readyz) // requested by lvscare
	mux.HandleFunc("/watch", func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintln(w, name)
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	})
	mux.HandleFunc("/version", func(w http.ResponseWriter, r *http.Request) { fmt.Fprintln(w, name) })
	mux.HandleFunc("/api/v1/namespaces/kube-public/configmaps/edgebake-masters", func(w http.ResponseWriter, r *http.Request) {
		b, err := os.ReadFile("/run/configmap.json")
		if err != nil {
			http.Error(w, "not found", 404)
			return
		}
		w.Write(b)
	})
	mux.HandleFunc("/requests", func(w http.ResponseWriter, r *http.Request) { fmt.Fprintln(w, requests.Load()) })
	kubeAPI(mux)
	ln, err := net.Listen("tcp", ":6443")
	if err != nil {
		fmt.Println("master:", err)
		os.Exit(1)
	}
	quiet := log.New(io.Discard, "", 0) // for handshakes that ipvscare aborts
	srv := &http.Server{Handler: mux, ErrorLog: quiet, TLSConfig: &tls.Config{Certificates: []tls.Certificate{cert}, NextProtos: []string{"h2", "http/1.1"}}}
	tlsLn := &sniffer{Listener: ln, name: name, conns: make(chan net.Conn)}
	plainLn := &sniffer{Listener: ln, conns: make(chan net.Conn)}
	go tlsLn.run(plainLn.conns)
	go (&http.Server{Handler: mux, ErrorLog: quiet}).Serve(plainLn)
	os.WriteFile(dir+"/up", nil, 0o644)
	fmt.Println("master:", srv.ServeTLS(tlsLn, "", ""))
	os.Exit(1)
}

// sniffer passes TLS connections on, and answers all others itself.
type sniffer struct {
	net.Listener
	name  string
	conns chan net.Conn
}

type sniffed struct {
	net.Conn
	r *bufio.Reader
}

func (c *sniffed) Read(b []byte) (int, error) { return c.r.Read(b) }

func (s *sniffer) Accept() (net.Conn, error) { return <-s.conns, nil }

func (s *sniffer) run(plain chan<- net.Conn) {
	for {
		c, err := s.Listener.Accept()
		if err != nil {
			fmt.Println("master:", err)
			os.Exit(1)
		}
		go func() {
			br := bufio.NewReaderSize(c, 4096)
			b, err := br.Peek(1)
			if err != nil {
				c.Close()
				return
			}
			if b[0] == 0x16 {
				s.conns <- &sniffed{c, br}
				return
			}
			if b[0] == 'G' { // HTTP without TLS
				plain <- &sniffed{c, br}
				return
			}
			fmt.Fprintln(c, s.name)
			io.Copy(io.Discard, br) // until the client disconnects
			c.Close()
		}()
	}
}

// authority signs masters' certificates.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pem  []byte
}

var serial atomic.Int64

func newAuthority(name string) *authority {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	check(err)
	tpl := &x509.Certificate{SerialNumber: big.NewInt(serial.Add(1)), Subject: pkix.Name{CommonName: name},
		NotBefore: epoch.AddDate(-1, 0, 0), NotAfter: epoch.AddDate(20, 0, 0), IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign}
	der, err := x509.CreateCertificate(rand.Reader, tpl, tpl, &key.PublicKey, key)
	check(err)
	cert, err := x509.ParseCertificate(der)
	check(err)
	return &authority{cert, key, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})}
}

// epoch is the boot time of the VM: certificates are valid around it.
var epoch = time.Now()

// issue returns a certificate and its key in PEM.
func (a *authority) issue(ips []net.IP, from, to time.Time) []byte {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	check(err)
	tpl := &x509.Certificate{SerialNumber: big.NewInt(serial.Add(1)), Subject: pkix.Name{CommonName: "kube-apiserver"},
		NotBefore: from, NotAfter: to, DNSNames: []string{"kubernetes", "apiserver.cluster.local"}, IPAddresses: ips,
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}
	der, err := x509.CreateCertificate(rand.Reader, tpl, a.cert, &key.PublicKey, a.key)
	check(err)
	kb, err := x509.MarshalPKCS8PrivateKey(key)
	check(err)
	return append(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: kb})...)
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}
