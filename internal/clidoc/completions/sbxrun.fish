# fish completion for sbxrun(1)

# Proposes words, files and names of sandboxes, as sbxrun describes.
function __sbxrun_complete
    set -l words (commandline -opc) (commandline -ct)
    set -l sbxrun (string replace -r '^~/' "$HOME/" -- $words[1])
    set -l lines (command $sbxrun __complete $words[2..] 2>/dev/null </dev/null)
    set -l action (string split ' ' -- $lines[1])
    set -l current $words[-1]
    set -l prefix (string match -r -- '^--[^=]*=' $current)
    switch "$action[1]"
        case files
            __fish_complete_path (string replace -- "$prefix" '' $current) | string replace -r '^' -- "$prefix"
        case directories
            __fish_complete_directories (string replace -- "$prefix" '' $current) | string replace -r '^' -- "$prefix"
        case variables
            string join \n -- "$prefix"(set -nx)
        case sandboxes
            command $sbxrun ps --names $action[2..] 2>/dev/null </dev/null
        case paths
            __fish_complete_path $current
            command $sbxrun ps --names 2>/dev/null </dev/null | string replace -r '$' ':'
        case command
            # Without a letter of it, the first word is not one of all that PATH has.
            if test (count $words) -gt 2 -o -n "$current"
                set -e words[-1]
                set -e words[1..(math $action[2] + 1)]
                set -l line (string join -- ' ' (string escape -- $words) $current)
                complete "-C $line" # with a blank, because fish takes no empty line
            end
    end
    set -q lines[2]; and string join \n -- "$prefix"$lines[2..]
end

complete -c sbxrun -f -a '(__sbxrun_complete)'
