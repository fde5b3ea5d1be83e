package registry

import (
	"bytes"
	"cmp"
	"encoding/base64"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"

	"github.com/docker/cli/cli/config/configfile"
	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
)

// Logins returns the credentials in a docker config.json. If path is empty, it returns those of the
// user's own configuration.
func Logins(path string) (authn.Keychain, error) {
	if path == "" {
		return userLogins{}, nil
	}
	return readAuthFile(path)
}

// userLogins contains the credentials of the user's docker or podman configuration.
type userLogins struct{}

func (userLogins) Resolve(target authn.Resource) (authn.Authenticator, error) {
	login, err := authn.DefaultKeychain.Resolve(target)
	if missingHelper(err) != "" {
		return authn.Anonymous, nil // if a login is needed, helperFix explains the error
	}
	return login, err
}

// helperFix returns the fix if the user's own login could not be read. Otherwise, it returns "".
func helperFix(registry string) string {
	target, err := name.NewRegistry(registry)
	if err != nil {
		return ""
	}
	_, err = authn.DefaultKeychain.Resolve(target)
	helper := missingHelper(err)
	if helper == "" {
		return ""
	}
	return fmt.Sprintf("the credential helper %s, which %s names, is not installed: install it, or remove credsStore and credHelpers from that file, and log in again", helper, userFile())
}

// userFile returns the path of the configuration that authn.DefaultKeychain reads.
func userFile() string {
	home, _ := os.UserHomeDir()
	docker := filepath.Join(cmp.Or(os.Getenv("DOCKER_CONFIG"), filepath.Join(home, ".docker")), "config.json")
	if _, err := os.Stat(docker); err == nil {
		return docker
	}
	return cmp.Or(os.Getenv("REGISTRY_AUTH_FILE"), "podman's containers/auth.json")
}

var helperNotFound = regexp.MustCompile(`exec: "(docker-credential-[^"]+)": executable file not found`)

// missingHelper returns the name of the credential helper that could not be started, or "".
func missingHelper(err error) string {
	if err == nil {
		return ""
	}
	if found := helperNotFound.FindStringSubmatch(err.Error()); found != nil {
		return found[1]
	}
	return ""
}

// authFile is a docker config.json. Like docker, it uses credential helpers and stores.
type authFile struct{ *configfile.ConfigFile }

// ErrAuthFile means that a credentials file cannot be used.
var ErrAuthFile = errors.New("reading authFile")

func readAuthFile(path string) (authFile, error) {
	// Reading a pipe or a device might never end.
	if fi, err := os.Stat(path); err == nil && !fi.Mode().IsRegular() {
		return authFile{}, fmt.Errorf("%w: %s is not a file", ErrAuthFile, path)
	}
	raw, err := os.ReadFile(path)
	if err != nil {
		return authFile{}, fmt.Errorf("%w: %w", ErrAuthFile, err)
	}
	a := authFile{configfile.New(path)}
	switch err := a.LoadFromReader(bytes.NewReader(raw)); {
	case err == nil && len(raw) > 0:
		return a, nil
	case err == nil: // an empty file, which LoadFromReader accepts
	case errors.As(err, new(base64.CorruptInputError)), err.Error() == "invalid auth configuration file":
		return authFile{}, fmt.Errorf("%w %s: an auth entry is not base64 of user:password", ErrAuthFile, path)
	}
	// Do not use the decoder's message: it may quote secrets from the file.
	return authFile{}, fmt.Errorf("%w %s: it is not a docker config.json", ErrAuthFile, path)
}

// Resolve returns the credentials for a repository or, if there are none, for its registry.
func (a authFile) Resolve(target authn.Resource) (authn.Authenticator, error) {
	keys := []string{target.String(), target.RegistryStr()}
	if target.RegistryStr() == name.DefaultRegistry {
		keys = append(keys, "docker.io", authn.DefaultAuthKey)
	}
	for _, key := range keys {
		c, err := a.GetAuthConfig(key)
		if helper := missingHelper(err); helper != "" {
			return nil, fmt.Errorf("%w %s: the credential helper %s is not installed", ErrAuthFile, a.Filename, helper)
		}
		if err != nil {
			return nil, fmt.Errorf("%w %s: getting the login of %s from its credential helper: %w", ErrAuthFile, a.Filename, key, err)
		}
		login := authn.AuthConfig{Username: c.Username, Password: c.Password, IdentityToken: c.IdentityToken, RegistryToken: c.RegistryToken}
		if login != (authn.AuthConfig{}) {
			return authn.FromConfig(login), nil
		}
	}
	return authn.Anonymous, nil
}
