package configs

import "net"

// apiServerPort returns the port of the first API server, which is also the port of the endpoint:
// the VIP has one port, even if the API servers have several.
func (s *Site) apiServerPort() string {
	_, port, err := net.SplitHostPort(s.Masters[0])
	if err != nil {
		panic("BUG: port of a Site that was not validated: " + err.Error())
	}
	return port
}

// EndpointHostPort returns the endpoint as "name:port". The Site must be valid.
func (s *Site) EndpointHostPort() string { return net.JoinHostPort(s.Endpoint, s.apiServerPort()) }

// EndpointURL returns the URL of the endpoint for a kubeconfig. The Site must be valid.
func (s *Site) EndpointURL() string { return "https://" + s.EndpointHostPort() }

// VIPHostPort returns the address and the port of the virtual server, such as "10.103.97.2:6443".
// The Site must be valid.
func (s *Site) VIPHostPort() string { return net.JoinHostPort(s.VIP, s.apiServerPort()) }
