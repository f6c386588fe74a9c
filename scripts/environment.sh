# shellcheck shell=bash
# Sourced by the other scripts: one virtual environment in .venv with the parts that this machine can use.
# EP_VENV names another place for it.

die() { printf '%s\n' "$@" >&2; exit 1; }

find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3.11 python3.12 python3.13 python3 python; do
    if [ -n "$candidate" ] && "$candidate" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  die "no Python 3.11 or newer was found" "looked for python3.11, python3.12, python3.13, python3, python" \
    "install one, or name it: PYTHON=/path/to/python $0"
}

has_nvidia_gpu() { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; }

reachable() { # URL: answers within 5 s
  "$python" - "$1" <<'PY' >/dev/null 2>&1
import sys, urllib.request
urllib.request.urlopen(urllib.request.Request(sys.argv[1], method="HEAD"), timeout=5)
PY
}

# Sets torch_args (how pip gets torch here) and torch_story (what people read).
choose_torch() {
  torch_args=("torch")
  case "$(uname -s)" in
    Darwin) torch_story="torch for macOS (about 0.1 GB to load)" ;;
    *)
      if has_nvidia_gpu; then
        torch_story="torch with CUDA, for the NVIDIA GPU (about 3 GB to load)"
      elif reachable https://download.pytorch.org/whl/cpu/torch/; then
        torch_args=("torch" --index-url https://download.pytorch.org/whl/cpu)
        torch_story="torch for the CPU (about 0.2 GB to load)"
      else
        torch_story="torch as pip finds it (0.2 GB if a CPU build is at hand, else 3 GB: PyTorch's CPU index did not answer in 5 s)"
      fi
      ;;
  esac
}

# has_extras EXTRA...: whether an installation of this state of the files has them all, perhaps among others.
has_extras() {
  local stamp file extra
  stamp=$(cat pyproject.toml constraints.txt | cksum)
  for file in "$venv"/edgepipe-*; do
    if [ "$(cat "$file" 2>/dev/null)" != "$stamp $PWD" ]; then continue; fi
    for extra in "$@"; do
      case ",${file##*/edgepipe-}," in *",$extra,"*) ;; *) continue 2 ;; esac
    done
    return 0
  done
  return 1
}

# ensure_venv EXTRA...: installs edgepipe editable with the extras, once per state of pyproject.toml and constraints.txt.
ensure_venv() {
  local extras venv
  extras=$(IFS=,; echo "$*")
  venv=${EP_VENV:-$PWD/.venv}
  python=$(find_python)
  [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
  python=$venv/bin/python
  PATH=$venv/bin:$PATH
  export PATH PYTHON=$python PIP_DISABLE_PIP_VERSION_CHECK=1
  if has_extras "$@"; then return; fi
  choose_torch
  echo "Installing into $venv:"
  echo "  edgepipe and what it needs (about 0.1 GB to load)"
  case ",$extras," in *,torch,*) echo "  $torch_story" ;; esac
  case ",$extras," in *,mlx,*) echo "  mlx (about 0.1 GB to load)" ;; esac
  case ",$extras," in *,dev,*) echo "  what the tests and checks need (about 0.1 GB to load)" ;; esac
  echo "The first time takes a minute or more."
  local quiet=(-qq)
  if [ -t 1 ]; then quiet=(); fi # people see pip's progress bars
  case ",$extras," in *,torch,*) "$python" -m pip install ${quiet[@]+"${quiet[@]}"} -c constraints.txt "${torch_args[@]}" ;; esac
  "$python" -m pip install ${quiet[@]+"${quiet[@]}"} -c constraints.txt -e ".[$extras]"
  echo "$(cat pyproject.toml constraints.txt | cksum) $PWD" >"$venv/edgepipe-$extras"
}
