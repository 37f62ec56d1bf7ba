package registry

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"

	"github.com/docker/cli/cli/config"
	"github.com/docker/cli/cli/config/configfile"
	"github.com/docker/cli/cli/config/types"
	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"

	"github.com/sbxrun/sbxrun/cleanup/result"
)

// credentials returns the credentials for a repository: those in authFile, or else in the first of the files in which
// podman login and docker login store them. Errors do not quote the file or the output of a credential helper.
func credentials(authFile string, repo name.Repository) (authn.Authenticator, error) {
	file, err := loadAuthFile(authFile)
	if file == nil {
		return authn.Anonymous, err
	}
	found, err := lookUp(file, repo)
	if err != nil || found == (types.AuthConfig{}) {
		return authn.Anonymous, err
	}
	return authn.FromConfig(authn.AuthConfig{
		Username: found.Username, Password: found.Password, Auth: found.Auth, IdentityToken: found.IdentityToken, RegistryToken: found.RegistryToken,
	}), nil
}

// lookUp returns the entry of the longest prefix of the repository, as podman does, or asks a credential helper. docker
// writes an empty entry for a registry whose credentials a helper has.
func lookUp(file *configfile.ConfigFile, repo name.Repository) (found types.AuthConfig, err error) {
	host, key := repo.RegistryStr(), repo.RegistryStr()
	hosts := []string{host}
	if host == name.DefaultRegistry {
		hosts, key = append(hosts, "docker.io"), authn.DefaultAuthKey
	}
	var keys []string
	for _, h := range hosts {
		for k := h + "/" + repo.RepositoryStr(); k != "."; k = path.Dir(k) {
			keys = append(keys, k)
		}
	}
	keys = append(keys, "https://"+host, "https://"+host+"/v1/", "https://"+host+"/v2/", "http://"+host)
	for _, k := range keys {
		found = file.AuthConfigs[k]
		found.ServerAddress = ""
		if found != (types.AuthConfig{}) {
			return found, nil
		}
	}
	if file.CredentialHelpers[key] == "" && file.CredentialsStore == "" {
		return found, nil
	}
	if found, err = file.GetAuthConfig(key); err != nil {
		return found, &result.Error{Code: "auth", Message: fmt.Sprintf("the credential helper for %s failed", host), Hint: "log in again, or use --authfile"}
	}
	found.ServerAddress = ""
	return found, nil
}

// loadAuthFile returns nil if authFile is "" and there is no other file.
func loadAuthFile(authFile string) (*configfile.ConfigFile, error) {
	if authFile != "" {
		return readAuthFile(authFile)
	}
	for _, name := range authFiles(os.Getenv) {
		file, err := readAuthFile(name)
		if !errors.Is(err, os.ErrNotExist) {
			return file, err
		}
	}
	return nil, nil
}

// authFiles lists the files that podman and docker use, in order of precedence.
func authFiles(env func(string) string) (list []string) {
	add := func(variable string, elements ...string) {
		if dir := env(variable); dir != "" {
			list = append(list, filepath.Join(append([]string{dir}, elements...)...))
		}
	}
	add("REGISTRY_AUTH_FILE")
	add("DOCKER_CONFIG", "config.json")
	add("XDG_RUNTIME_DIR", "containers", "auth.json")
	add("XDG_CONFIG_HOME", "containers", "auth.json")
	add("HOME", ".config", "containers", "auth.json")
	add("HOME", ".docker", "config.json")
	return list
}

func readAuthFile(name string) (*configfile.ConfigFile, error) {
	const most = 1 << 20
	f, err := os.Open(name)
	if err != nil {
		return nil, fmt.Errorf("read credentials: %w", err)
	}
	defer f.Close()
	file, err := config.LoadFromReader(io.LimitReader(f, most))
	if err != nil {
		return nil, &result.Error{Code: "auth", Message: fmt.Sprintf("read credentials: %s is not a valid config.json of docker login", name)}
	}
	return file, nil
}
