-- Makes an entry due at another time.
--
-- KEYS     entries
-- ARGV[1]  member
-- ARGV[2]  name of the keys of due entries, without the queue
-- ARGV[3]  time at which it is expected to be due; empty for any
-- ARGV[4]  time until it is due, in microseconds
--
-- Returns S, or N if there is no such entry or it is due at another time, and the member.
local member = ARGV[1]
local value, failed = call('HGET', KEYS[1], member)
if failed then
  return failed
end
if not value then
  return {'N', member}
end
local queue = queue_of(value)
if not queue then
  return redis.error_reply('HAPAX expected an entry of the schedule, found another value in the hash: remove the member')
end
local due
due, failed = call('ZSCORE', ARGV[2] .. queue, member)
if failed then
  return failed
end
if not due or ARGV[3] ~= '' and tonumber(due) ~= tonumber(ARGV[3]) then
  return {'N', member}
end
due, failed = call('ZADD', ARGV[2] .. queue, digits(now + ARGV[4]), member)
return failed or {'S', member}
