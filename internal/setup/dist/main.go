// Command dist prints the software bill of materials of a Go program in CycloneDX form: the modules that the go
// command has recorded in it. make.sh calls it. It is in its own module, with the program that makes packages,
// because sbxrun needs none of their modules.
//
// usage: dist -version VERSION PROGRAM
package main

import (
	"debug/buildinfo"
	"encoding/base64"
	"encoding/hex"
	"flag"
	"fmt"
	"io"
	"os"
	"path"
	"runtime/debug"
	"strings"

	"github.com/CycloneDX/cyclonedx-go"
)

func main() {
	version := flag.String("version", "", "the program's `version`")
	flag.Parse()
	if flag.NArg() != 1 || *version == "" {
		fmt.Fprintln(os.Stderr, "usage: dist -version VERSION PROGRAM")
		os.Exit(2)
	}
	if err := run(os.Stdout, flag.Arg(0), *version); err != nil {
		fmt.Fprintln(os.Stderr, "dist: error:", err)
		os.Exit(1)
	}
}

func run(w io.Writer, program, version string) error {
	info, err := buildinfo.ReadFile(program)
	if err != nil {
		return err
	}
	b, err := bom(info, version)
	if err != nil {
		return err
	}
	return cyclonedx.NewBOMEncoder(w, cyclonedx.BOMFileFormatJSON).SetPretty(true).EncodeVersion(b, cyclonedx.SpecVersion1_6)
}

// bom returns a bill of materials without serial number and time, so that the same program always has the same one.
func bom(info *debug.BuildInfo, version string) (*cyclonedx.BOM, error) {
	program := component(cyclonedx.ComponentTypeApplication, info.Main.Path, version)
	program.Name = path.Base(info.Path)
	program.Licenses = &cyclonedx.Licenses{{License: &cyclonedx.License{ID: "MIT"}}}
	program.Properties = &[]cyclonedx.Property{}
	for _, s := range info.Settings {
		if s.Key == "GOOS" || s.Key == "GOARCH" || s.Key == "CGO_ENABLED" {
			*program.Properties = append(*program.Properties, cyclonedx.Property{Name: "go:" + s.Key, Value: s.Value})
		}
	}

	// The standard library has no record of its own; its version is the compiler's.
	compiler, _, _ := strings.Cut(strings.TrimPrefix(info.GoVersion, "go"), " ") // "go1.26.0 X:nodwarf5"
	modules := []cyclonedx.Component{component(cyclonedx.ComponentTypeLibrary, "std", compiler)}
	for _, m := range info.Deps {
		if m.Replace != nil {
			m = m.Replace
		}
		c := component(cyclonedx.ComponentTypeLibrary, m.Path, m.Version)
		sum, err := base64.StdEncoding.DecodeString(strings.TrimPrefix(m.Sum, "h1:"))
		if err != nil || len(sum) == 0 {
			return nil, fmt.Errorf("module %s: checksum %q", m.Path, m.Sum)
		}
		c.Hashes = &[]cyclonedx.Hash{{Algorithm: cyclonedx.HashAlgoSHA256, Value: hex.EncodeToString(sum)}}
		modules = append(modules, c)
	}

	needs := []string{}
	for _, c := range modules {
		needs = append(needs, c.BOMRef)
	}
	b := cyclonedx.NewBOM()
	b.Metadata = &cyclonedx.Metadata{Component: &program}
	b.Components = &modules
	b.Dependencies = &[]cyclonedx.Dependency{{Ref: program.BOMRef, Dependencies: &needs}}
	return b, nil
}

// component is a module with its package URL.
func component(kind cyclonedx.ComponentType, module, version string) cyclonedx.Component {
	purl := "pkg:golang/" + module + "@" + strings.ReplaceAll(version, "+", "%2B")
	return cyclonedx.Component{Type: kind, Name: module, Version: version, PackageURL: purl, BOMRef: purl}
}
