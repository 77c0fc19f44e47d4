"""Every limit of the core, with its unit at the end of its name. Nothing else lives here.

A loop, page, queue, payload, depth or retry without a constant in this file is a defect.
"""

from __future__ import annotations

KIB = 1024
MIB = 1024 * KIB

# identities and text
ID_CHARS_MAX = 256
TEXT_CHARS_MAX = 65_536
FAILURE_MESSAGE_CHARS_MAX = 16_384

# payloads
INLINE_BYTES_MAX = 1 * MIB  # larger payloads of records stand beside their batch, by digest
PAYLOAD_BYTES_MAX = 16 * MIB
JSON_DEPTH_MAX = 64
JSON_NODES_MAX = 65_536
INTEGER_BITS_MAX = 64  # signed: -2**63 .. 2**63-1
CANONICAL_INTEGER_MAX = 2**53 - 1  # beyond it canonical JSON carries a tagged decimal string

# log
BATCH_RECORDS_MAX = 256
PAGE_BATCHES_MAX = 512
PAGE_ROWS_MAX = 1000
LISTED_MAX = 1_000_000  # rows that one listing of the app returns
SCAN_RECORDS_MAX = 20_000  # read in one snapshot before the next is taken; a thread is never divided
APPROVALS_MAX = 1_000_000  # requests of people that are looked at in one reading
FINDINGS_MAX = 1000  # failed checks that one verification names
PEEK_BATCHES = 16  # read on the loop before the rest is read off it
RESPONSE_CALLS_MAX = 1024  # tool calls in one model response
RESPONSE_BYTES_MAX = 8 * MIB
MEMORY_THREADS_MAX = 256  # `memory:` stores: threads kept
MEMORY_BYTES_MAX = 64 * MIB  # `memory:` stores: all logs together
MEMORY_THREAD_BYTES_MAX = 4 * MIB

# engine
WORKERS_MAX = 1024
LEASE_SECONDS = 10.0
LEASE_SECONDS_MIN = 0.05
RENEWALS_PER_LEASE = 3
LOOP_STALL_SECONDS_MAX = 3.0  # or half the lease, whichever is smaller
RECOVERY_SECONDS_MAX = 30.0
RECOVERY_PERIOD_SECONDS = 5.0
STORE_RETRY_SECONDS = 0.2  # between tries of a write that a worker must make and the store could not
MISSED_WAKE_SECONDS_MAX = 5.0  # then whoever waits looks again, although nothing was heard
FAULT_BACKOFF_SECONDS_MIN = 0.5
FAULT_BACKOFF_SECONDS_MAX = 300.0
ATTEMPTS_WITHOUT_PROGRESS_MAX = 8  # then the submission waits for an operator (redrive)
ATTEMPT_BACKOFF_SECONDS_MAX = 60.0
PROBE_BACKOFF_SECONDS_MIN = 1.0
PROBE_BACKOFF_SECONDS_MAX = 300.0
PROBE_SECONDS_MAX = 30.0
VERDICTS_MAX = 16  # on one effect that its changed tool leaves open again and again
SIBLING_GRACE_SECONDS_MAX = 5.0  # started `once` siblings of a failing call may finish first
DRAIN_SECONDS_MAX = 30.0
STOP_SECONDS_MAX = 10.0  # for calls in flight to obey their cancellation when a worker stops
MODEL_TRIES_MAX = 4
MODEL_CALL_SECONDS_MAX = 600.0  # of one try; a stream that stalls is given up by then
MODEL_BACKOFF_SECONDS_MIN = 0.2
MODEL_BACKOFF_SECONDS_MAX = 20.0
MODEL_FAILURES_MAX = 64  # tries of one run's model calls, over all its turns and attempts, that gave no response
RETRY_AFTER_SECONDS_MAX = 3600.0  # a provider that asks for more is not waited for
RATE_WINDOW_SECONDS = 60.0
RATE_JITTER_SECONDS_MAX = 0.05  # added to a wait for a model's rate
RESERVED_OUTPUT_TOKENS = 4096  # reserved for an answer where no most is set; asked for where there is a budget
ANSWER_TOKENS_MIN = 256  # a call is not made when a budget leaves less for its answer
BUDGET_WARNING_PERCENT = 80
FILES_MAX = 64  # files of one input
FILE_NAME_CHARS_MAX = 255
FILE_URL_CHARS_MAX = 8192

# secrets
SECRET_FILE_BYTES_MAX = 64 * KIB
SECRET_OUTPUT_BYTES_MAX = 16 * KIB
SECRET_ARGUMENTS_MAX = 64  # of the program that prints one
SECRET_ARGUMENT_BYTES_MAX = 4096
SECRET_PROCESS_SECONDS = 5.0  # unless it is said otherwise
SECRET_PROCESS_SECONDS_MAX = 60.0

# store
GROUP_UNITS_MAX = 512  # units of work in one COMMIT
GROUP_MILLISECONDS_MAX = 50
BUSY_SECONDS_MAX = 60.0
BUSY_WARNING_SECONDS = 5.0  # of waiting for another process's write lock, before that is logged
WATCH_SECONDS = 0.025  # how often a process looks for other processes' commits
INLINE_COMMIT_SECONDS_MAX = 0.001  # a lone unit runs on the loop's thread while commits are faster than this
INLINE_UNITS_MAX = 64  # a group of at most so many does
INLINE_GROUP_SECONDS_MAX = 0.004  # ... while commits are faster than this

# live events, provisional, for whoever watches a run
LIVE_EVENTS_SECONDS = 60.0  # kept in the store for other processes
LIVE_WATCH_SECONDS = 10.0  # a watcher in another process says so again within half of it
LIVE_FLUSH_SECONDS = 0.05  # between two writes of the events of one run
LIVE_EVENTS_MAX = 10_000  # kept for one watcher that is slow to take them; the oldest go

# policy defaults
TURNS_MAX = 16
TOOL_CALLS_MAX = 64
DURATION_SECONDS = 30 * 60.0
DURATION_WAITING_SECONDS = 7 * 24 * 3600.0
CONCURRENCY = 4
REPEATED_FAILURES_MAX = 3
OUTPUT_RETRIES_MAX = 2
TOOL_RESULT_BYTES_MAX = 50 * KIB
TOOL_RESULT_BYTES_MIN = 256

# workflows
PLAN_BYTES_MAX = 64 * MIB
TASKS_UNCOMMITTED_MAX = 64  # batches of pure tasks on their way to the store before it is waited for
TIMER_SECONDS_MAX = 1.0  # a wait that is shorter holds its worker
EXPRESSION_CHARS_MAX = 4096
EXPRESSION_REFERENCES_MAX = 256
PLANNED_TASKS_MAX = 20_000  # of one plan, expanded
PLANNED_ID_CHARS_MAX = 200  # of a task's id, expanded
SUBWORKFLOW_DEPTH_MAX = 32  # sub-workflows inside sub-workflows

# executors
READ_BYTES_MAX = 1 * MIB  # of a file that a task reads
DIFF_CHARS_MAX = 64 * KIB
LINKS_MAX = 40  # followed by one path
PROCESS_GRACE_SECONDS = 0.5  # between asking a process group to end and ending it
ARTIFACT_BYTES_MAX = 16 * MIB
ARTIFACT_LEASE_SECONDS = 3600.0
ARTIFACT_CHUNK_BYTES = 1 * MIB
HTTP_BODY_KEPT_BYTES = 64 * KIB  # of an answer that was not expected

# workflow documents
DOCUMENT_BYTES_MAX = 1 * MIB
DOCUMENT_NODES_MAX = 100_000  # with aliases followed
DOCUMENT_DEPTH_MAX = 64
CAPTURED_FILES_MAX = 256  # references to files of one document
CAPTURED_BYTES_MAX = 16 * MIB  # of all of them

# long-term memory
MEMORY_ENTRY_BYTES_MAX = 1 * MIB
MEMORY_QUERY_BYTES_MAX = 64 * KIB
MEMORY_RESULTS_MAX = 100
MEMORY_SCANNED_MAX = 10_000  # entries of a namespace that one search looks at

# protocols
MCP_MESSAGE_BYTES_MAX = 8 * MIB  # of one line of a server that is a process
MCP_PAGES_MAX = 100  # of a listing of tools
MCP_TOOLS_MAX = 1000  # of one server
PROTOCOL_TEXT_CHARS_MAX = 4096  # of what a remote said, kept in an error
PROTOCOL_FAREWELL_SECONDS = 0.8  # to tell a remote that it is no longer wanted
A2A_PARTS_MAX = 1000  # of the artifacts of one remote task
