package cluster

import (
	"bytes"
	"encoding/json"
	"net/http"
	"strings"

	"github.com/sbxrun/sbxrun/internal/api"
)

// nodeHeader names the node for a request. Requests about volumes or snapshots need it, because these belong to one node
// and outlive its instances, so no ID identifies the node.
const nodeHeader = "Sbxrun-Node"

// targetNode returns the node that a request names, or an error if it must name one and does not.
func targetNode(r *http.Request, body []byte) (node string, err error) {
	node = r.Header.Get(nodeHeader)
	if node == "" && (strings.HasPrefix(r.URL.Path, "/v1/snapshots") || strings.HasPrefix(r.URL.Path, "/v1/volumes") || usesStorage(body)) {
		return "", api.NewError(api.Usage, "volumes and snapshots are on one node, and the request does not say which", "send the header "+nodeHeader+"; the id of a session begins with its node's name")
	}
	return node, nil
}

// usesStorage reports whether a request, or the tool call in it, is about a volume or a snapshot.
func usesStorage(body []byte) bool {
	if !bytes.Contains(body, []byte(`"volumes"`)) && !bytes.Contains(body, []byte(`"snapshot"`)) {
		return false
	}
	var m struct {
		api.Parts
		Params struct {
			Arguments api.Parts `json:"arguments"`
		} `json:"params"`
	}
	_ = json.Unmarshal(body, &m) // a node reports errors
	return m.Snapshot != "" || len(m.Volumes) > 0 || m.Params.Arguments.Snapshot != "" || len(m.Params.Arguments.Volumes) > 0
}
