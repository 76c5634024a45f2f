# Completion of holdfast in fish. In ~/.config/fish/config.fish: holdfast completion fish | source

function _holdfast_completion
    set -l program (commandline -opc)[1]
    for line in (COMP_LINE=(commandline -cp) _HOLDFAST_COMPLETE=fish_complete $program 2>/dev/null)
        set -l parts (string split --max 2 \t -- $line)
        switch $parts[1]
            case dir
                __fish_complete_directories (commandline -ct)
            case file
                __fish_complete_path (commandline -ct)
            case plain
                string join \t -- $parts[2..]
        end
    end
end

complete --command holdfast --no-files --keep-order --arguments '(_holdfast_completion)'
