package environ

import "slices"

// A Set holds at most one [Var] of each name. The zero value is an empty set.
type Set struct {
	vars  []Var
	index map[string]int // name to position in vars
}

// Put adds v. A variable of the same name is replaced and keeps its place.
func (s *Set) Put(v Var) {
	if i, ok := s.index[v.Name]; ok {
		s.vars[i] = v
		return
	}
	if s.index == nil {
		s.index = make(map[string]int)
	}
	s.index[v.Name] = len(s.vars)
	s.vars = append(s.vars, v)
}

// Lookup returns the value of the variable called name, and whether there is one.
func (s *Set) Lookup(name string) (value string, ok bool) {
	i, ok := s.index[name]
	if !ok {
		return "", false
	}
	return s.vars[i].Value, true
}

// Vars returns the variables in the order in which their names were first put.
// The slice is the caller's.
func (s *Set) Vars() []Var {
	return slices.Clone(s.vars)
}
