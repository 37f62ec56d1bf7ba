package pool

// Ahead returns the number of interpreters that wait for their programs.
func (s *Source) Ahead() int {
	s.aheadMutex.Lock()
	defer s.aheadMutex.Unlock()
	return len(s.ahead)
}
