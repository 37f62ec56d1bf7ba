package server

import (
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/sbxrun/sbxrun/internal/api"
)

// CheckOrigin rejects requests that a page of another site sends, as the Model Context
// Protocol demands for every request, also with a token. hosts lists the names of this server besides the request's own.
func CheckOrigin(r *http.Request, hosts []string) error {
	origin := r.Header.Get("Origin")
	if origin == "" {
		return nil
	}
	u, err := url.Parse(origin)
	if err == nil && u.Host != "" {
		name := u.Hostname()
		own, _, splitErr := net.SplitHostPort(r.Host)
		if splitErr != nil {
			own = r.Host
		}
		if u.Host == r.Host || strings.EqualFold(name, own) && u.Port() == "" || slices.ContainsFunc(hosts, func(h string) bool { return strings.EqualFold(h, name) }) {
			return nil
		}
	}
	return api.NewError(api.Policy, "the request comes from a page of another site", "add its host to hosts in the configuration")
}
