"""Day one on a GPU: everything that only a GPU can show, in stages that each leave their result on disk.

`stage` says what a stage is, `stages/` has a file for each, `registry` their order; `conductor` runs each in
a process of its own within its time, and `page` writes what they found."""
