#compdef holdfast
# Completion of holdfast in zsh. In ~/.zshrc, after compinit: eval "$(holdfast completion zsh)"

_holdfast_completion() {
    local type value description
    local -a values described
    local line="${(j: :)words[1,CURRENT-1]} $QIPREFIX$PREFIX"
    while IFS=$'\t' read -r type value description; do
        case $type in
            dir) _path_files -/ ;;
            file) _path_files ;;
            plain)
                if [[ -n $description ]]; then
                    described+=("${${value//\\/\\\\}//:/\\:}:$description")
                else
                    values+=("$value")
                fi
                ;;
        esac
    done < <(COMP_LINE="$line" _HOLDFAST_COMPLETE=zsh_complete "${(Q)words[1]}" 2>/dev/null)
    (( $#described )) && _describe -V holdfast described
    (( $#values )) && compadd -V holdfast -a values
}

if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    _holdfast_completion "$@"
else
    compdef _holdfast_completion holdfast
fi
