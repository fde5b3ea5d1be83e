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

// Logins returns the credentials in a docker config.json. An empty path means the user's own
// configuration.
func Logins(path string) (authn.Keychain, error) {
	if path == "" {
		return userLogins{}, nil
	}
	return readAuthFile(path)
}

// userLogins is the keychain of the user's own docker or podman configuration.
type userLogins struct{}

func (userLogins) Resolve(target authn.Resource) (authn.Authenticator, error) {
	login, err := authn.DefaultKeychain.Resolve(target)
	if missingHelper(err) != "" {
		return authn.Anonymous, nil // if a login is needed, helperFix explains the error
	}
	return login, err
}

// helperFix returns the fix if the user's own login could not be read, and "" for other causes.
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

// userFile returns the name of the configuration that authn.DefaultKeychain
// reads.
func userFile() string {
	home, _ := os.UserHomeDir()
	docker := filepath.Join(cmp.Or(os.Getenv("DOCKER_CONFIG"), filepath.Join(home, ".docker")), "config.json")
	if _, err := os.Stat(docker); err == nil {
		return docker
	}
	return cmp.Or(os.Getenv("REGISTRY_AUTH_FILE"), "podman's containers/auth.json")
}

var helperNotFound = regexp.MustCompile(`exec: "(docker-credential-[^"]+)": executable file not found`)

// missingHelper returns the name of the program that err could not start, or "".
func missingHelper(err error) string {
	if err == nil {
		return ""
	}
	if found := helperNotFound.FindStringSubmatch(err.Error()); found != nil {
		return found[1]
	}
	return ""
}

// authFile is a docker config.json with its credential helpers and stores, read
// as docker does.
type authFile struct{ *configfile.ConfigFile }

// ErrAuthFile means that a file of credentials cannot be used.
var ErrAuthFile = errors.New("reading authFile")

func readAuthFile(path string) (authFile, error) {
	// A pipe or a device could be read forever.
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
	// The decoder's message may quote the file, which holds secrets.
	return authFile{}, fmt.Errorf("%w %s: it is not a docker config.json", ErrAuthFile, path)
}

// Resolve returns the credentials for a repository, or else those for its
// registry.
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
