# Prints the output of failed tests, with their verdicts, from the output of go test -v. The lines of parallel tests
# alternate; a line with === names the test of the next ones.

/^=== PAUSE / { next }
/^=== / { name = $3; next }
/^ *--- (PASS|SKIP): / { delete text[$3]; next }
/^ *--- FAIL: / { printf "%s%s\n", text[$3], $0; delete text[$3]; next }
/^(ok|PASS|\?) / || /^(PASS|FAIL)$/ { name = ""; next }
/^FAIL/ {
    # No verdict: a panic, a timeout or a compile error.
    for (name in text) printf "%s", text[name]
    for (name in text) delete text[name]
    name = ""
    print
    next
}
{ text[name] = text[name] $0 "\n" }
END { for (name in text) if (name != "") printf "%s", text[name] }
