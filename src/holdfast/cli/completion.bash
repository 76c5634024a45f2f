# Completion of holdfast in bash 4.4 or newer. In ~/.bashrc: eval "$(holdfast completion bash)"

_holdfast_completion() {
    local type value description
    while IFS=$'\t' read -r type value description; do
        case $type in
            dir) compopt -o dirnames ;;
            file) compopt -o default ;;
            plain)
                # 63: readline only lists the values, and inserts none.
                [[ $COMP_TYPE == 63 && -n $description ]] && value+="  ($description)"
                COMPREPLY+=("$value")
                ;;
        esac
    done < <(COMP_LINE="${COMP_LINE:0:COMP_POINT}" COMP_WORD="$2" _HOLDFAST_COMPLETE=bash_complete "$1" 2>/dev/null)
}

complete -o nosort -F _holdfast_completion holdfast
