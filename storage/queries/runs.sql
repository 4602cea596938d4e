-- runs: what each job left in the store.
-- One row per run and target: its policies, where its prompts came from (collect: a job, traffic: a server's users), when
-- it wrote first and last, units, prompts, failed prompts, why the others finished, output tokens, rounds and draft nodes
-- verified.
SELECT
    run_id,
    target,
    string_agg(DISTINCT policy, ', ' ORDER BY policy) AS policies,
    string_agg(DISTINCT coalesce(source, 'collect'), ', ' ORDER BY coalesce(source, 'collect')) AS sources,
    min(written_at) AS first_written_at,
    max(written_at) AS last_written_at,
    count(DISTINCT unit_id) AS num_units,
    count(*) AS num_sequences,
    count(*) FILTER (error IS NOT NULL) AS num_errors,
    count(*) FILTER (finish_reason = 'stop') AS num_stop,
    count(*) FILTER (finish_reason = 'length') AS num_length,
    sum(len(output_token_ids))::BIGINT AS num_output_tokens,
    sum(num_rounds)::BIGINT AS num_rounds,
    sum(num_drafted)::BIGINT AS num_drafted
FROM sequences
GROUP BY run_id, target
ORDER BY first_written_at, run_id, target;
