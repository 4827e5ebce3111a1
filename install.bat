@echo off
rem Installs the pack into ComfyUI: double-click, or drop ComfyUI's folder onto this file.
rem Any Python will do here: install.py finds ComfyUI's own.
setlocal
set "WHERE="
if not "%~1"=="" set WHERE=--comfyui "%~1"
for %%P in (
    "%~dp0..\..\..\python_embeded\python.exe"
    "%~dp0..\..\.venv\Scripts\python.exe"
    "%~dp0..\..\venv\Scripts\python.exe"
    "%~1\python_embeded\python.exe"
    "%~1\..\python_embeded\python.exe"
    "%~1\.venv\Scripts\python.exe"
    "%~1\venv\Scripts\python.exe"
    "%VIRTUAL_ENV%\Scripts\python.exe"
    "%CONDA_PREFIX%\python.exe"
) do if exist %%P (
    %%P "%~dp0install.py" %WHERE%
    goto end
)
where py >nul 2>nul
if not errorlevel 1 (
    py -3 "%~dp0install.py" %WHERE%
    goto end
)
python "%~dp0install.py" %WHERE%
:end
pause
