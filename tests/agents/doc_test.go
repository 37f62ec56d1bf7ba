// Package agents tests "sbxrun mcp" with coding agents, whose model is a stub. internal/setup/agents.sh runs it.
package agents
