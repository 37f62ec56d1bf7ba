package values

import "strings"

// Within reports whether a clean path is dir or lies below it.
func Within(name, dir string) bool {
	return name == dir || dir == "/" || len(name) > len(dir) && name[len(dir)] == '/' && strings.HasPrefix(name, dir)
}

// SplitColon splits at unescaped colons and removes the escapes.
func SplitColon(s string) []string {
	parts := []string{""}
	for i := 0; i < len(s); i++ {
		switch c := s[i]; {
		case c == ':':
			parts = append(parts, "")
			continue
		case c == '\\' && i+1 < len(s) && (s[i+1] == ':' || s[i+1] == '\\'):
			i++
		}
		parts[len(parts)-1] += s[i : i+1]
	}
	return parts
}

// ShellQuote quotes a word for sh(1).
func ShellQuote(s string) string {
	const safe = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789@%+=:,./_-"
	if s != "" && strings.Trim(s, safe) == "" {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}
