package cli

import (
	"bytes"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/alecthomas/kong"
)

// examples are what --help shows of each command, and of all.
var examples = map[string]string{
	"":        "sbxrun --timeout 5 python3 job.py",
	"run":     "sbxrun run --timeout 5 python3 job.py",
	"start":   "sbxrun start --name web --ready-tcp 8000 --wait-ready python3 -m http.server",
	"exec":    "sbxrun exec --timeout 5 web make test",
	"ps":      "sbxrun ps --all --status failed",
	"inspect": "sbxrun inspect web",
	"wait":    "sbxrun wait web --timeout 1m",
	"logs":    "sbxrun logs -f web --stream stderr",
	"kill":    "sbxrun kill web --grace 1s",
	"cleanup": "sbxrun cleanup --older-than 24h",
	"stats":   "sbxrun stats --watch",
	"doctor":  "sbxrun doctor",
}

// Words is what may follow the name of a command: [flags] SANDBOX... and the like.
func Words(command *kong.Node) string { return command.Tag.Get("words") }

// Help writes the help of the whole command line, or of one command.
func Help(w io.Writer, command string) error {
	k, err := New(&CLI{})
	if err != nil {
		return err
	}
	var synopsis, intro string
	name := command
	if command == "" {
		name = "run"
	}
	node, err := find(k.Model, name)
	if err != nil {
		return err
	}
	if command == "" {
		synopsis = fmt.Sprintf("sbxrun [run] %s\n       sbxrun %s ...", Words(node), strings.Join(others(k.Model), "|"))
		intro = k.Model.Help + "\n\n" + list(k.Model)
	} else {
		synopsis = "sbxrun " + command + " " + Words(node)
		intro = node.Help + "\n"
	}
	flags, err := flagsHelp(k, node)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(w, "Usage: %s\n\nExample: %s\n\n%s%s", synopsis, examples[command], intro, flags)
	return err
}

func find(model *kong.Application, command string) (*kong.Node, error) {
	for _, node := range model.Children {
		if node.Name == command {
			return node, nil
		}
	}
	return nil, fmt.Errorf("no command %q", command)
}

// others are the commands that have to be named.
func others(model *kong.Application) (names []string) {
	for _, node := range model.Children {
		if node != model.DefaultCmd {
			names = append(names, node.Name)
		}
	}
	return names
}

// list is the commands, one on a line.
func list(model *kong.Application) string {
	var b strings.Builder
	b.WriteString("Commands (sbxrun NAME --help tells more):\n")
	for _, node := range model.Children {
		fmt.Fprintf(&b, "  %-7s  %s\n", node.Name, node.Help)
	}
	return b.String()
}

// flagsHelp is the flags of a command by topic, as kong prints them.
func flagsHelp(k *kong.Kong, node *kong.Node) (string, error) {
	ctx, err := kong.Trace(k, []string{node.Name})
	if err != nil {
		return "", err
	}
	slices.SortStableFunc(node.Flags, func(a, b *kong.Flag) int { return topic(a) - topic(b) })
	node.Help = ""
	var text bytes.Buffer
	ctx.Stdout = &text
	options := kong.HelpOptions{NoAppSummary: true, WrapUpperBound: 100, ValueFormatter: withDefault}
	err = kong.DefaultHelpPrinter(options, ctx)
	return text.String(), err
}

// topic is the place of a flag's group in the order of all.
func topic(flag *kong.Flag) int {
	if flag.Group == nil {
		return -1
	}
	return slices.IndexFunc(groups, func(g kong.Group) bool { return g.Key == flag.Group.Key })
}

// withDefault is a flag's help with its default, if that says something.
func withDefault(v *kong.Value) string {
	if v.Default == "" || v.Default == "0" || strings.Contains(v.Help, "efault") {
		return v.Help
	}
	return strings.TrimSuffix(v.Help, ".") + " (default " + v.Default + ")."
}
