// Package manifests checks the examples for Docker Compose and Kubernetes against what these know.
// It is a module of its own, because theirs are many times larger than what sbxrun needs.
package manifests

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/compose-spec/compose-go/v2/loader"
	"github.com/compose-spec/compose-go/v2/types"
	apps "k8s.io/api/apps/v1"
	core "k8s.io/api/core/v1"
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

// The file fits the schema of the Compose specification, and says what docs/operating.md does.
func TestCompose(t *testing.T) {
	p, err := loader.LoadWithContext(context.Background(), types.ConfigDetails{
		WorkingDir:  examples,
		ConfigFiles: []types.ConfigFile{{Filename: "compose.yaml", Content: read(t, "compose.yaml")}},
		Environment: types.Mapping{},
	}, func(o *loader.Options) { o.SetProjectName("examples", true) })
	if err != nil {
		t.Fatal(err)
	}
	s, err := p.GetService("sbxrun")
	if err != nil {
		t.Fatal(err)
	}
	operating, err := os.ReadFile("../../docs/operating.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, option := range s.SecurityOpt {
		if !bytes.Contains(operating, []byte(option)) {
			t.Errorf("security_opt %s is not in docs/operating.md", option)
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

// Each object has only the members that Kubernetes has, and of their types.
func TestKubernetes(t *testing.T) {
	kinds := map[string]any{"Deployment": &apps.Deployment{}, "Service": &core.Service{}, "Secret": &core.Secret{}, "ConfigMap": &core.ConfigMap{}}
	for i, text := range bytes.Split(read(t, "kubernetes.yaml"), []byte("\n---\n")) {
		var kind meta.TypeMeta
		if err := yaml.Unmarshal(text, &kind); err != nil {
			t.Fatal(err)
		}
		o, ok := kinds[kind.Kind]
		if !ok {
			t.Fatalf("object %d is a %q", i, kind.Kind)
		}
		if err := yaml.UnmarshalStrict(text, o); err != nil {
			t.Errorf("%s: %v", kind.Kind, err)
		}
		delete(kinds, kind.Kind)
		if d, ok := o.(*apps.Deployment); ok {
			checkPod(t, &d.Spec.Template.Spec)
		}
	}
	if len(kinds) > 0 {
		t.Errorf("not there: %v", kinds)
	}
}

// checkPod looks for the settings of docs/operating.md.
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
}
