package harness

import (
	"reflect"
	"slices"
	"strings"
)

// MemberNames lists the paths of the JSON members of a struct, depth first, except those of types
// that are described elsewhere.
func MemberNames(t reflect.Type, elsewhere ...reflect.Type) []string {
	return memberNames("", t, elsewhere)
}

func memberNames(prefix string, t reflect.Type, elsewhere []reflect.Type) (names []string) {
	switch t.Kind() {
	case reflect.Pointer:
		return memberNames(prefix, t.Elem(), elsewhere)
	case reflect.Slice:
		return memberNames(prefix+"[]", t.Elem(), elsewhere)
	case reflect.Struct:
	default:
		return nil
	}
	if slices.Contains(elsewhere, t) {
		return nil
	}
	for i := range t.NumField() {
		f := t.Field(i)
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		if !f.IsExported() && !f.Anonymous {
			continue
		}
		if f.Anonymous && slices.Contains(elsewhere, f.Type) {
			continue
		}
		path := strings.TrimPrefix(prefix+"."+name, ".")
		names = append(append(names, path), memberNames(path, f.Type, elsewhere)...)
	}
	return names
}
