"""Pulls, claims, reads the hit prefix, computes, writes, settles.

side                    makes all parts
puller, handoff         which jobs are pulled; one job until its message is settled
decode_links            a connection to each decode worker, for claims and commits
task                    one granted attempt, as all threads see it
engine, scheduler       gives tasks to vLLM; what vLLM's scheduler calls meanwhile
reach, transfer_worker  connects to a decode worker's KV memory; copies to and from it
"""
