-- throughput: tokens per second of decoding, per run, policy and task.
-- One row per group of recorded rounds. A round's durations are those of its whole batch, so a sequence's share is the
-- batch_size-th part; engine_s adds the shares: seconds of one engine, prefill not included.
-- mat: mean acceptance length, bonus included, pooled over rounds.
SELECT
    s.run_id,
    s.target,
    s.policy,
    s.task,
    count(DISTINCT s.sequence_id) AS num_sequences,
    count(*) AS num_rounds,
    sum(r.num_tokens)::BIGINT AS num_tokens,
    avg(r.num_tokens) AS mat,
    avg(r.batch_size) AS mean_batch_size,
    sum((r.draft_ns + r.build_ns + r.verify_ns + r.commit_ns) / r.batch_size) / 1e9 AS engine_s,
    sum(r.num_tokens) / nullif(engine_s, 0) AS tokens_per_s
FROM rounds r
JOIN sequences s USING (unit_id, attempt, sequence_id)
WHERE r.kind = 'decoded'
GROUP BY s.run_id, s.target, s.policy, s.task
ORDER BY s.run_id, s.target, s.policy, s.task;
