//go:build agents

package agents

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"sync"
	"testing"
)

// model is a stub of the APIs of language models. It asks for one call of a tool whose name ends with "run_code", and
// answers with a final text when it has got the result.
type model struct {
	*httptest.Server
	code string

	mu      sync.Mutex
	results []string // requests that contain a result of the tool
	log     []string
}

const (
	callID = "call_0000000000000001"
	final  = "The tool has answered."
)

func newModel(t *testing.T, code string) *model {
	m := &model{code: code}
	m.Server = httptest.NewServer(m)
	t.Cleanup(m.Close)
	return m
}

func (m *model) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	var request struct {
		Tools    json.RawMessage
		Stream   *bool
		Input    json.RawMessage
		Messages json.RawMessage
		Contents json.RawMessage
	}
	_ = json.Unmarshal(body, &request)
	space, name := tool(request.Tools)
	conversation := string(request.Input) + string(request.Messages) + string(request.Contents)
	answered := strings.Contains(conversation, callID) || strings.Contains(conversation, `"functionResponse"`)
	m.mu.Lock()
	if name == "" {
		var names []string
		for _, m := range regexp.MustCompile(`"name": ?"([^"]*)"`).FindAllSubmatch(request.Tools, -1) {
			names = append(names, string(m[1]))
		}
		m.log = append(m.log, strings.Join(names, " "))
	}
	m.log = append(m.log, fmt.Sprintf("%s %s: tool %q %q, answered %v, %d bytes", r.Method, r.URL, space, name, answered, len(body)))
	if answered {
		m.results = append(m.results, conversation)
	}
	m.mu.Unlock()
	call := !answered && name != ""
	arguments := map[string]any{"code": m.code, "language": "python"}
	events := &events{w: w}
	switch path := r.URL.Path; {
	case strings.HasSuffix(path, "/responses"):
		responses(events, call, space, name, arguments)
	case strings.HasSuffix(path, "/chat/completions"):
		completions(events, call, name, arguments)
	case strings.HasSuffix(path, "/messages"):
		messages(events, call, name, arguments)
	case strings.HasSuffix(path, ":streamGenerateContent"):
		events.send("", generated(call, name, arguments))
	case strings.HasSuffix(path, ":generateContent"):
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(generated(call, name, arguments))
	default:
		http.NotFound(w, r)
	}
}

// tool returns the name of the tool that runs code, and of the namespace that contains it. Each API declares tools in
// its own form.
func tool(tools json.RawMessage) (space, name string) {
	var list any
	_ = json.Unmarshal(tools, &list)
	var find func(v any, in string)
	find = func(v any, in string) {
		switch v := v.(type) {
		case []any:
			for _, v := range v {
				find(v, in)
			}
		case map[string]any:
			if s, _ := v["name"].(string); strings.HasSuffix(s, "run_code") {
				space, name = in, s
			} else if v["type"] == "namespace" {
				in = s
			}
			for _, key := range []string{"function", "functionDeclarations", "tools"} {
				find(v[key], in)
			}
		}
	}
	find(list, "")
	return space, name
}

type object = map[string]any

// events writes server-sent events.
type events struct{ w http.ResponseWriter }

func (e *events) send(name string, data any) {
	e.w.Header().Set("Content-Type", "text/event-stream")
	if name != "" {
		fmt.Fprintf(e.w, "event: %s\n", name)
	}
	text, _ := json.Marshal(data)
	fmt.Fprintf(e.w, "data: %s\n\n", text)
}

// typed sends an event whose data repeats its name.
func (e *events) typed(name string, data object) {
	data["type"] = name
	e.send(name, data)
}

func encoded(v any) string {
	text, _ := json.Marshal(v)
	return string(text)
}

// responses answers as OpenAI's /v1/responses.
func responses(e *events, call bool, space, name string, arguments object) {
	item := object{"type": "message", "id": "msg_1", "role": "assistant", "content": []object{{"type": "output_text", "text": final}}}
	if call {
		item = object{"type": "function_call", "id": "fc_1", "call_id": callID, "name": name, "arguments": encoded(arguments)}
		if space != "" {
			item["namespace"] = space
		}
	}
	e.typed("response.created", object{"response": object{"id": "resp_1"}})
	e.typed("response.output_item.done", object{"output_index": 0, "item": item})
	e.typed("response.completed", object{"response": object{"id": "resp_1", "usage": object{"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}}})
}

// completions answers as OpenAI's /v1/chat/completions.
func completions(e *events, call bool, name string, arguments object) {
	delta, reason := object{"role": "assistant", "content": final}, "stop"
	if call {
		delta = object{"role": "assistant", "tool_calls": []object{{"index": 0, "id": callID, "type": "function", "function": object{"name": name, "arguments": encoded(arguments)}}}}
		reason = "tool_calls"
	}
	for _, choice := range []object{{"index": 0, "delta": delta}, {"index": 0, "delta": object{}, "finish_reason": reason}} {
		e.send("", object{"id": "chat_1", "object": "chat.completion.chunk", "created": 1, "model": "stub", "choices": []object{choice}})
	}
	fmt.Fprint(e.w, "data: [DONE]\n\n")
}

// messages answers as Anthropic's /v1/messages.
func messages(e *events, call bool, name string, arguments object) {
	block, delta, reason := object{"type": "text", "text": ""}, object{"type": "text_delta", "text": final}, "end_turn"
	if call {
		block = object{"type": "tool_use", "id": callID, "name": name, "input": object{}}
		delta, reason = object{"type": "input_json_delta", "partial_json": encoded(arguments)}, "tool_use"
	}
	e.typed("message_start", object{"message": object{"id": "msg_1", "type": "message", "role": "assistant", "model": "stub", "content": []any{}, "usage": object{"input_tokens": 1, "output_tokens": 1}}})
	e.typed("content_block_start", object{"index": 0, "content_block": block})
	e.typed("content_block_delta", object{"index": 0, "delta": delta})
	e.typed("content_block_stop", object{"index": 0})
	e.typed("message_delta", object{"delta": object{"stop_reason": reason}, "usage": object{"output_tokens": 1}})
	e.typed("message_stop", object{})
}

// generated is an answer of Gemini's generateContent.
func generated(call bool, name string, arguments object) object {
	part := object{"text": final}
	if call {
		part = object{"functionCall": object{"name": name, "args": arguments}}
	}
	return object{"candidates": []object{{"index": 0, "finishReason": "STOP", "content": object{"role": "model", "parts": []object{part}}}}}
}
