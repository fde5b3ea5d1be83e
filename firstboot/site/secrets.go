package site

import (
	"net/url"
	"strings"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot/kubeapi"
)

// SecretsOf lists the secrets of a Site that must not be shown.
func SecretsOf(s *configs.Site) []string {
	if s == nil {
		return nil
	}
	var out []string
	add := func(v string) {
		if len(v) >= 4 { // anything shorter would mask ordinary words
			out = append(out, v)
		}
	}
	token := s.Credentials.Token.Reveal()
	add(token)
	if _, secret, err := kubeapi.SplitToken(token); err == nil {
		add(secret)
	}
	if k := s.Credentials.Keys; k != nil {
		for _, secret := range k.Secrets() {
			for line := range strings.Lines(secret.Reveal()) {
				if line = strings.TrimSpace(line); len(line) >= 24 && !strings.HasPrefix(line, "-----") {
					out = append(out, line)
				}
			}
		}
	}
	for _, i := range s.Network.Interfaces {
		if i.WiFi != nil {
			add(i.WiFi.PSK.Reveal())
			add(i.WiFi.Password.Reveal())
		}
	}
	for _, proxy := range []configs.Secret{s.Network.Proxy.HTTP, s.Network.Proxy.HTTPS} {
		if u, err := url.Parse(proxy.Reveal()); err == nil && u.User != nil {
			password, _ := u.User.Password()
			add(password)
			add(u.User.String())
		}
	}
	for _, u := range s.Users {
		add(u.PasswordHash.Reveal())
	}
	return out
}
