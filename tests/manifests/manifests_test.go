// Package manifests validates the examples for Docker Compose and Kubernetes. It is a module of
// its own, because their modules are many times larger than those of sbxrun.
package manifests

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/compose-spec/compose-go/v2/loader"
	"github.com/compose-spec/compose-go/v2/types"
	"github.com/yannh/kubeconform/pkg/validator"
	apps "k8s.io/api/apps/v1"
	autoscaling "k8s.io/api/autoscaling/v2"
	core "k8s.io/api/core/v1"
	policy "k8s.io/api/policy/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"
)

const examples = "../../clients/examples"

func read(t *testing.T, name string) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(examples, name))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// project reads a Compose file.
func project(t *testing.T, name string, environment types.Mapping) *types.Project {
	t.Helper()
	p, err := loader.LoadWithContext(context.Background(), types.ConfigDetails{
		WorkingDir:  filepath.Dir(filepath.Join(examples, name)),
		ConfigFiles: []types.ConfigFile{{Filename: filepath.Base(name), Content: read(t, name)}},
		Environment: environment,
	}, func(o *loader.Options) { o.SetProjectName("examples", true) })
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// The file fits the schema of the Compose specification, and has the settings of
// docs/guides/deploy.md.
func TestCompose(t *testing.T) {
	checkService(t, project(t, "compose.yaml", types.Mapping{}), "sbxrun")
}

// Three servers of NATS, four nodes and two gateways, each with its name and password in
// nats.conf.
func TestComposeCluster(t *testing.T) {
	passwords := types.Mapping{"GATEWAY": "secret-g"}
	for i := range 4 {
		passwords[fmt.Sprint("NODE_", i+1)] = fmt.Sprint("secret-", i+1)
	}
	p := project(t, "cluster/compose.yaml", passwords)
	conf := string(read(t, "cluster/nats.conf"))
	kinds := map[string]int{}
	for name, s := range p.Services {
		kinds[strings.TrimRight(name, "0123456789")]++
		if len(s.Configs) != 1 {
			t.Fatalf("%s has %d configurations", name, len(s.Configs))
		}
		text := p.Configs[s.Configs[0].Source].Content
		switch strings.TrimRight(name, "0123456789") {
		case "nats":
			if s.Environment["NATS_NAME"] == nil || *s.Environment["NATS_NAME"] != name || !strings.Contains(conf, "tls://"+name+":6222") {
				t.Errorf("%s: %v", name, s.Environment)
			}
			for _, key := range []string{"GATEWAY", "NODE_1", "NODE_2", "NODE_3", "NODE_4"} {
				if s.Environment[key] == nil || !strings.Contains(conf, "$"+key) {
					t.Errorf("%s lacks %s", name, key)
				}
			}
		case "node":
			checkService(t, p, name)
			user := name + ":secret-" + strings.TrimPrefix(name, "node")
			if strings.Count(text, user+"@nats") != 3 || !strings.Contains(text, "node = \""+name+"\"") || !strings.Contains(conf, "{user: "+name+",") {
				t.Errorf("%s: %s", name, text)
			}
		case "gateway":
			if strings.Count(text, "gateway:secret-g@nats") != 3 || !strings.Contains(text, "replicas = 3") {
				t.Errorf("%s: %s", name, text)
			}
		}
	}
	if kinds["nats"] != 3 || kinds["node"] != 4 || kinds["gateway"] != 2 || len(kinds) != 3 {
		t.Errorf("%v", kinds)
	}
}

// checkService checks the settings of docs/guides/deploy.md.
func checkService(t *testing.T, p *types.Project, name string) {
	t.Helper()
	s, err := p.GetService(name)
	if err != nil {
		t.Fatal(err)
	}
	operating, err := os.ReadFile("../../docs/guides/deploy.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, option := range s.SecurityOpt {
		if !bytes.Contains(operating, []byte(option)) {
			t.Errorf("security_opt %s is not in docs/guides/deploy.md", option)
		}
	}
	for _, want := range []string{"seccomp=unconfined", "apparmor=unconfined", "systempaths=unconfined"} {
		if !slices.Contains(s.SecurityOpt, want) {
			t.Errorf("security_opt lacks %s", want)
		}
	}
	if s.Init == nil || !*s.Init || s.PidsLimit == 0 || s.MemLimit == 0 || s.Cgroup != "private" || s.StopGracePeriod == nil {
		t.Errorf("init %v, pids_limit %d, mem_limit %d, cgroup %q, stop_grace_period %v", s.Init, s.PidsLimit, s.MemLimit, s.Cgroup, s.StopGracePeriod)
	}
}

// objects reads the objects in a Kubernetes file by kind. They may have only members that
// Kubernetes has, with the right types.
func objects(t *testing.T, name string) map[string][]any {
	t.Helper()
	kinds := map[string]func() any{
		"Deployment": func() any { return &apps.Deployment{} }, "StatefulSet": func() any { return &apps.StatefulSet{} }, "Service": func() any { return &core.Service{} },
		"Secret": func() any { return &core.Secret{} }, "ConfigMap": func() any { return &core.ConfigMap{} },
		"PodDisruptionBudget":     func() any { return &policy.PodDisruptionBudget{} },
		"HorizontalPodAutoscaler": func() any { return &autoscaling.HorizontalPodAutoscaler{} },
	}
	all := map[string][]any{}
	for i, text := range bytes.Split(read(t, name), []byte("\n---\n")) {
		var kind meta.TypeMeta
		if err := yaml.Unmarshal(text, &kind); err != nil {
			t.Fatal(err)
		}
		made, ok := kinds[kind.Kind]
		if !ok {
			t.Fatalf("object %d is a %q", i, kind.Kind)
		}
		o := made()
		if err := yaml.UnmarshalStrict(text, o); err != nil {
			t.Errorf("%s: %v", kind.Kind, err)
		}
		all[kind.Kind] = append(all[kind.Kind], o)
	}
	return all
}

func TestKubernetes(t *testing.T) {
	all := objects(t, "kubernetes.yaml")
	for _, kind := range []string{"Deployment", "Service", "Secret", "ConfigMap"} {
		if len(all[kind]) != 1 {
			t.Errorf("%d of kind %s", len(all[kind]), kind)
		}
	}
	checkPod(t, &all["Deployment"][0].(*apps.Deployment).Spec.Template.Spec)
}

// Nodes have the settings of a single server, and gateways no privilege. Each node sees only its
// own credentials, which the chart's values contain.
func TestKubernetesCluster(t *testing.T) {
	all := objects(t, "cluster/kubernetes.yaml")
	if len(all["StatefulSet"]) != 1 || len(all["Deployment"]) != 1 || len(all["HorizontalPodAutoscaler"]) != 1 {
		t.Fatalf("%v", all)
	}
	nodes := all["StatefulSet"][0].(*apps.StatefulSet)
	checkPod(t, &nodes.Spec.Template.Spec)
	gateway := all["Deployment"][0].(*apps.Deployment).Spec.Template.Spec.Containers[0].SecurityContext
	if gateway.RunAsNonRoot == nil || !*gateway.RunAsNonRoot || gateway.ReadOnlyRootFilesystem == nil || !*gateway.ReadOnlyRootFilesystem || gateway.SeccompProfile != nil {
		t.Errorf("gateway: %+v", gateway)
	}
	secrets := map[string]map[string]string{}
	for _, o := range all["Secret"] {
		secrets[o.(*core.Secret).Name] = o.(*core.Secret).StringData
	}
	var values struct {
		Config struct {
			Cluster struct{ Replicas int }
			Merge   struct {
				Accounts map[string]struct {
					Users []struct{ User, Password string }
				}
			}
		}
		Container struct{ Env map[string]any }
	}
	if err := yaml.Unmarshal(read(t, "cluster/nats-values.yaml"), &values); err != nil {
		t.Fatal(err)
	}
	users := map[string]bool{}
	for _, u := range slices.Concat(values.Config.Merge.Accounts["SBXRUN"].Users, values.Config.Merge.Accounts["NODES"].Users) {
		users[u.User] = true
		if values.Container.Env[strings.Trim(u.Password, "<$> ")] == nil {
			t.Errorf("where %s has its password from is not said", u.User)
		}
	}
	replicas := int(*nodes.Spec.Replicas)
	if values.Config.Cluster.Replicas != 3 || len(users) != replicas+1 || len(secrets["sbxrun-nodes"]) != replicas {
		t.Errorf("%d servers, users %v, %d configurations of nodes", values.Config.Cluster.Replicas, users, len(secrets["sbxrun-nodes"]))
	}
	for i := range replicas {
		name := fmt.Sprintf("%s-%d", nodes.Name, i)
		if text := secrets["sbxrun-nodes"][name+".toml"]; !strings.Contains(text, "tls://"+name+":") || !strings.Contains(text, "\nmetrics_tenants = ") || !users[name] {
			t.Errorf("%s: %s", name, text)
		}
	}
	// Their permissions match nats.conf, which has tests.
	text := string(read(t, "cluster/nats-values.yaml"))
	for _, m := range regexp.MustCompile(`"((?:sbxrun|\$|_INBOX)[^"]*)"`).FindAllStringSubmatch(string(read(t, "cluster/nats.conf")), -1) {
		if subject := regexp.MustCompile(`\bnode1\b`).ReplaceAllString(m[1], "sbxrun-node-0"); !regexp.MustCompile(`\bnode[2-9]\b`).MatchString(subject) &&
			!regexp.MustCompile(`[\[ ]`+regexp.QuoteMeta(subject)+`[,\]]`).MatchString(text) {
			t.Errorf("nats-values.yaml lacks %s", subject)
		}
	}
	for _, m := range regexp.MustCompile(`\{(?:stream|service): (?:\{account: [A-Z]+, subject: )?"[^}]*\}`).FindAllString(string(read(t, "cluster/nats.conf")), -1) {
		if !strings.Contains(text, "- "+strings.ReplaceAll(m, `"`, "")) {
			t.Errorf("nats-values.yaml lacks %s", m)
		}
	}
	h := all["HorizontalPodAutoscaler"][0].(*autoscaling.HorizontalPodAutoscaler).Spec
	if h.ScaleTargetRef.Name != nodes.Name || int(h.MaxReplicas) > replicas {
		t.Errorf("%+v", h)
	}
	series(t, h.Metrics[0].Pods.Metric.Name)
}

// keda is the version that the schema comes from.
const keda = "github.com/kedacore/keda/v2@v2.18.0"

// The file fits the schema of KEDA, and queries documented series.
func TestKEDA(t *testing.T) {
	var crd struct {
		Spec struct {
			Versions []struct {
				Schema struct{ OpenAPIV3Schema map[string]any }
			}
		}
	}
	if err := yaml.Unmarshal(downloaded(t, keda, "config/crd/bases/keda.sh_scaledobjects.yaml"), &crd); err != nil {
		t.Fatal(err)
	}
	root := crd.Spec.Versions[0].Schema.OpenAPIV3Schema
	properties := root["properties"].(map[string]any)
	delete(properties, "metadata") // all objects have it
	strict(root)
	properties["metadata"] = map[string]any{}
	dir := t.TempDir()
	write(t, filepath.Join(dir, "scaledobject-keda-v1alpha1.json"), root)
	conform(t, schemas(t, dir), "cluster/keda.yaml", "maxReplicaCount")
	for _, name := range regexp.MustCompile(`sbxrun_[a-z_]+`).FindAllString(string(read(t, "cluster/keda.yaml")), -1) {
		series(t, name)
	}
}

// kubernetes is the version that the schemas come from. The types in go.mod have the same version.
const kubernetes = "k8s.io/kubernetes@v1.37.2"

// The files fit the schemas of Kubernetes.
func TestKubernetesSchemas(t *testing.T) {
	var swagger struct{ Definitions map[string]map[string]any }
	if err := json.Unmarshal(downloaded(t, kubernetes, "api/openapi-spec/swagger.json"), &swagger); err != nil {
		t.Fatal(err)
	}
	d := swagger.Definitions
	// The schema has only one of their two JSON types.
	d["io.k8s.apimachinery.pkg.util.intstr.IntOrString"]["type"] = []string{"string", "integer"}
	d["io.k8s.apimachinery.pkg.api.resource.Quantity"]["type"] = []string{"string", "number"}
	dir := t.TempDir()
	for name, schema := range d {
		strict(schema)
		kinds, _ := schema["x-kubernetes-group-version-kind"].([]any) // parts of objects have none
		for _, kind := range kinds {
			k := kind.(map[string]any)
			group, _, _ := strings.Cut(k["group"].(string), ".")
			parts := slices.DeleteFunc([]string{k["kind"].(string), group, k["version"].(string)}, func(s string) bool { return s == "" })
			write(t, filepath.Join(dir, strings.ToLower(strings.Join(parts, "-"))+".json"), map[string]any{"$ref": "all.json#/definitions/" + name})
		}
	}
	write(t, filepath.Join(dir, "all.json"), map[string]any{"definitions": d})
	v := schemas(t, dir)
	conform(t, v, "kubernetes.yaml", "replicas", "containerPort", "selector")
	conform(t, v, "cluster/kubernetes.yaml", "serviceName", "minReplicas", "maxUnavailable")
}

// schemas returns a validator with schemas from a directory.
func schemas(t *testing.T, dir string) validator.Validator {
	t.Helper()
	v, err := validator.New([]string{dir + "/{{.ResourceKind}}{{.KindSuffix}}.json"}, validator.Opts{Strict: true})
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// conform asserts that kubeconform accepts a manifest, and rejects it with misspelt members.
func conform(t *testing.T, v validator.Validator, name string, members ...string) {
	t.Helper()
	manifest := read(t, name)
	check := func(manifest []byte) (wrong []error) {
		objects := 0
		for _, r := range v.Validate("", io.NopCloser(bytes.NewReader(manifest))) {
			if objects++; r.Status != validator.Valid {
				wrong = append(wrong, fmt.Errorf("%v %v", r.Status, r.Err))
			}
		}
		if want := bytes.Count(manifest, []byte("\nkind: ")); objects != want {
			t.Errorf("%d objects, want %d", objects, want)
		}
		return wrong
	}
	if wrong := check(manifest); wrong != nil {
		t.Error(wrong)
	}
	for _, name := range members {
		other := bytes.Replace(manifest, []byte(name+":"), []byte(name+"x:"), 1)
		if bytes.Equal(other, manifest) || check(other) == nil {
			t.Errorf("%sx is let pass", name)
		}
	}
}

// downloaded reads a file of a module that is too large to build with.
func downloaded(t *testing.T, name, file string) []byte {
	t.Helper()
	out, err := exec.Command("go", "mod", "download", "-json", name).Output()
	var module struct{ Dir string }
	if err != nil || json.Unmarshal(out, &module) != nil {
		t.Fatalf("%v %s", err, out)
	}
	text, err := os.ReadFile(filepath.Join(module.Dir, file))
	if err != nil {
		t.Fatal(err)
	}
	return text
}

func write(t *testing.T, name string, v any) {
	t.Helper()
	text, err := json.Marshal(v)
	if err == nil {
		err = os.WriteFile(name, text, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// strict makes a schema reject unknown members.
func strict(v any) {
	switch v := v.(type) {
	case map[string]any:
		if _, is := v["properties"].(map[string]any); is && v["additionalProperties"] == nil {
			v["additionalProperties"] = false
		}
		for _, x := range v {
			strict(x)
		}
	case []any:
		for _, x := range v {
			strict(x)
		}
	}
}

// series asserts that a series is documented.
func series(t *testing.T, name string) {
	t.Helper()
	for _, file := range []string{"../../docs/guides/server.md", "../../docs/guides/cluster.md"} {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if bytes.Contains(text, []byte("`"+name)) {
			return
		}
	}
	t.Errorf("%s is not documented", name)
}

// checkPod looks for the settings of docs/guides/deploy.md.
func checkPod(t *testing.T, p *core.PodSpec) {
	if p.HostUsers == nil || *p.HostUsers || len(p.Containers) != 1 {
		t.Fatalf("hostUsers %v, %d containers", p.HostUsers, len(p.Containers))
	}
	c := p.Containers[0]
	s := c.SecurityContext
	if s == nil || s.ProcMount == nil || *s.ProcMount != core.UnmaskedProcMount || s.SeccompProfile == nil || s.SeccompProfile.Type != core.SeccompProfileTypeUnconfined ||
		s.AppArmorProfile == nil || s.AppArmorProfile.Type != core.AppArmorProfileTypeUnconfined || s.AllowPrivilegeEscalation == nil || *s.AllowPrivilegeEscalation {
		t.Errorf("securityContext %+v", s)
	}
	if c.Resources.Limits.Memory().IsZero() || c.Resources.Limits.Cpu().IsZero() || c.ReadinessProbe == nil || c.LivenessProbe == nil {
		t.Errorf("resources %v, probes %v and %v", c.Resources, c.ReadinessProbe, c.LivenessProbe)
	}
	for _, v := range p.Volumes {
		const kept = 3 << 30 // bytes, by the defaults of files.quota and calls.output
		if d := v.EmptyDir; d != nil && (d.SizeLimit.Value() <= kept || d.SizeLimit.Cmp(*c.Resources.Limits.Memory()) >= 0) {
			t.Errorf("volume %s has %v of the memory", v.Name, d.SizeLimit)
		}
	}
}
