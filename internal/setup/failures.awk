# Of the output of go test -v: what failed tests have printed, with their verdicts.
# Tests that run side by side take turns; a line says whose turn it is.

/^=== PAUSE / { next }
/^=== / { name = $3; next }
/^ *--- (PASS|SKIP): / { delete text[$3]; next }
/^ *--- FAIL: / { printf "%s%s\n", text[$3], $0; delete text[$3]; next }
/^(ok|PASS|\?) / || /^(PASS|FAIL)$/ { name = ""; next }
/^FAIL/ {
    # No verdict: a panic, a time limit, or it could not be compiled.
    for (name in text) printf "%s", text[name]
    for (name in text) delete text[name]
    name = ""
    print
    next
}
{ text[name] = text[name] $0 "\n" }
END { for (name in text) if (name != "") printf "%s", text[name] }
