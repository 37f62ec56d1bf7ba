package pool

// Ahead is how many interpreters wait for their programs.
func (s *Source) Ahead() int {
	s.aheadMutex.Lock()
	defer s.aheadMutex.Unlock()
	return len(s.ahead)
}
