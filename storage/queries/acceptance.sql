-- acceptance: how far the accepted path reaches, by task and depth.
-- One row per task and depth, over rounds that drafted something. num_in_tree: rounds whose tree has a node at that depth;
-- num_accepted: rounds whose accepted path reaches it; acceptance: num_accepted / num_rounds; acceptance_given_parent:
-- num_accepted / rounds whose accepted path reached the depth before.
WITH drafted AS (
    SELECT s.target, s.task, len(r.accepted) AS num_accepted, list_max(r.tree_depths) AS tree_depth
    FROM rounds r
    JOIN sequences s USING (unit_id, attempt, sequence_id)
    WHERE r.kind = 'decoded' AND r.budget > 0
),
depths AS (
    SELECT unnest(range(1, (SELECT max(tree_depth) FROM drafted) + 1)) AS depth
)
SELECT
    target,
    task,
    depth,
    count(*) AS num_rounds,
    count(*) FILTER (tree_depth >= depth) AS num_in_tree,
    count(*) FILTER (drafted.num_accepted >= depth) AS num_accepted,
    count(*) FILTER (drafted.num_accepted >= depth) / count(*) AS acceptance,
    count(*) FILTER (drafted.num_accepted >= depth)
        / nullif(count(*) FILTER (drafted.num_accepted >= depth - 1), 0) AS acceptance_given_parent
FROM drafted, depths
GROUP BY target, task, depth
ORDER BY target, task, depth;
