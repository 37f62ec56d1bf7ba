# bash completion for sbxrun(1)

# Collects the words before the cursor: whole ones in words, although bash takes
# them apart at = and :, and in at the index in COMP_WORDS where each begins.
_sbxrun_words() {
    local line=$COMP_LINE part i
    words=() at=()
    for ((i = 0; i <= COMP_CWORD; i++)); do
        part=${COMP_WORDS[i]}
        if ((i > 0)) && [[ -n $line && $line != [[:blank:]]* ]]; then
            words[${#words[@]}-1]+=$part
        else
            words+=("$part")
            at+=("$i")
        fi
        line=${line#"${line%%[![:blank:]]*}"}
        line=${line#"$part"}
    done
}

# Proposes the names of sandboxes that sbxrun ps prints with the flags $@.
_sbxrun_sandboxes() {
    local name
    while read -r name; do # compgen would expand the names
        [[ $name == "$cur"* ]] && COMPREPLY+=("$name")
    done < <("$sbxrun" ps --names "$@" 2>/dev/null </dev/null)
}

# Completes the sandboxed command, whose first word is words[$1], as if it stood
# alone.
_sbxrun_payload() {
    if declare -F _comp_command_offset >/dev/null; then
        _comp_command_offset "${at[$1]}"
    elif declare -F _command_offset >/dev/null; then
        _command_offset "${at[$1]}"
    elif (($1 == ${#words[@]} - 1)); then
        compopt -o filenames
        mapfile -t COMPREPLY < <(compgen -c -- "$cur")
    else
        compopt -o default
    fi
}

_sbxrun() {
    COMPREPLY=()
    local cur=${COMP_WORDS[COMP_CWORD]} words at sbxrun lines action files
    [[ $cur == [=:] ]] && cur=
    _sbxrun_words
    sbxrun=${words[0]/#\~\//$HOME/}
    mapfile -t lines < <("$sbxrun" __complete "${words[@]:1}" 2>/dev/null </dev/null)
    lines=("${lines[@]%%$'\t'*}")
    read -ra action <<<"${lines[0]}"
    case ${action[0]} in
        files) compopt -o filenames; mapfile -t COMPREPLY < <(compgen -f -- "$cur") ;;
        directories) compopt -o filenames; mapfile -t COMPREPLY < <(compgen -d -- "$cur") ;;
        variables) mapfile -t COMPREPLY < <(compgen -e -- "$cur") ;;
        sandboxes) _sbxrun_sandboxes "${action[@]:1}" ;;
        paths)
            if [[ $cur != *:* ]]; then
                _sbxrun_sandboxes
                COMPREPLY=("${COMPREPLY[@]/%/:}")
                compopt -o nospace
            fi
            mapfile -t files < <(compgen -f -- "$cur")
            COMPREPLY+=("${files[@]}")
            ;;
        command)
            # Without a letter of it, the first word is not one of all that PATH has.
            [[ ${#words[@]} == 2 && -z $cur ]] || _sbxrun_payload $((action[1] + 1))
            ;;
    esac
    mapfile -t -O ${#COMPREPLY[@]} COMPREPLY < <(compgen -W "${lines[*]:1}" -- "$cur")
}

complete -F _sbxrun sbxrun
