package lab

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"
)

// ServeNetBoot answers guests whose firmware boots from the network: a web
// server shows dir, and dnsmasq tells whoever asks as an HTTPClient to boot
// the file of that name there. It returns the address of dir. Both end with
// the lab.
func (l *Lab) ServeNetBoot(ctx context.Context, ns *Namespace, dir, file string) (url string, err error) {
	addr := net.JoinHostPort(Gateway, "8080")
	url = "http://" + addr
	ln, err := ns.Listen(ctx, "tcp", addr)
	if err != nil {
		return "", fmt.Errorf("serving %s: %w", dir, err)
	}
	server := &http.Server{Handler: http.FileServer(http.Dir(dir)), ReadHeaderTimeout: time.Minute}
	failed := make(chan error, 1)
	go func() { failed <- server.Serve(ln) }()
	l.onClose(func() error {
		err := server.Close()
		if serving := <-failed; !errors.Is(serving, http.ErrServerClosed) {
			err = errors.Join(err, serving)
		}
		return err
	})
	_, err = l.start("dnsmasq", ns.Wrap([]string{"dnsmasq", "--conf-file=/dev/null", "--keep-in-foreground", "--log-facility=-", "--user=root", "--port=0",
		"--bind-interfaces", "--interface=br0", "--dhcp-range=10.103.0.150,10.103.0.160,255.255.255.0", "--dhcp-leasefile=/dev/null",
		"--dhcp-vendorclass=set:http,HTTPClient", "--dhcp-option-force=tag:http,60,HTTPClient", "--dhcp-boot=tag:http," + url + "/" + file}), nil)
	return url, err
}
