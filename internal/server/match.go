package server

import (
	"path"
	"slices"
	"strings"
)

// matcher matches paths against the patterns of collect, with a limited number of steps. A pattern has the
// syntax of path.Match, in which ** stands for any number of directories. A directory that matches includes
// everything below it.
type matcher struct {
	patterns []pattern
	left     int // steps
}

type pattern struct {
	text    string
	parts   []string
	matched bool
}

func newMatcher(patterns []string) *matcher {
	m := &matcher{left: maxMatchSteps}
	for _, text := range patterns {
		parts := strings.Split(strings.TrimSuffix(text, "/"), "/")
		if parts[len(parts)-1] == "**" {
			parts = append(parts, "*") // everything below, but not the directory itself
		}
		m.patterns = append(m.patterns, pattern{text: text, parts: parts})
	}
	return m
}

// any reports whether a path matches, and whether paths below it can match. It fails when the steps are used up.
func (m *matcher) any(name string) (matches, below bool, err error) {
	parts := strings.Split(name, "/")
	for i := range m.patterns {
		p := &m.patterns[i]
		if matches && p.matched {
			continue // nothing to find out
		}
		is, further := m.match(p.parts, parts)
		p.matched = p.matched || is
		matches, below = matches || is, below || further
		if m.left < 0 {
			return false, false, usage("the patterns of collect are too expensive for so many files (stopped at %.80q); use fewer or more specific ones, such as out/*.png", name)
		}
	}
	return matches, below, nil
}

// match reports whether a pattern matches a name or a directory above it, and whether it can match below.
// at has the positions in the pattern that the parts so far can reach.
func (m *matcher) match(pattern, name []string) (matches, below bool) {
	end := len(pattern)
	at := make([]bool, end+1)
	at[0] = true
	for _, part := range name {
		skipDirectories(pattern, at)
		next := make([]bool, end+1)
		m.left -= 1 + end
		for i, p := range pattern {
			switch {
			case !at[i]:
			case p == "**":
				next[i] = true
			case m.part(p, part):
				next[i+1] = true
			}
		}
		if at = next; at[end] {
			return true, true
		}
	}
	return false, slices.Contains(at, true)
}

// skipDirectories adds the positions after **, which also stands for no directory.
func skipDirectories(pattern []string, at []bool) {
	for i, p := range pattern {
		at[i+1] = at[i+1] || at[i] && p == "**"
	}
}

// part matches one part of a name. path.Match takes up to the product of both lengths in steps.
func (m *matcher) part(pattern, name string) bool {
	if !strings.ContainsAny(pattern, `*?[\`) {
		m.left -= 1 + min(len(pattern), len(name))
		return pattern == name
	}
	m.left -= 1 + len(pattern)*len(name)
	if m.left < 0 {
		return false
	}
	ok, _ := path.Match(pattern, name)
	return ok
}

// unmatched returns the patterns that have matched nothing.
func (m *matcher) unmatched() (list []string) {
	for _, p := range m.patterns {
		if !p.matched {
			list = append(list, p.text)
		}
	}
	return list
}
